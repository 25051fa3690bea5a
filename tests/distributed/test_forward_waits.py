"""Which module waits for which parameters, without ranks."""

import copy
from collections.abc import Sequence

import torch
from torch import nn

from bert_unpad.batch import PackedInputs, VarlenBatch
from bert_unpad.distributed.forward_waits import ForwardWaits
from bert_unpad.nn import BertConfig, BertForPreTraining
from tests.support.shard_nets import batch, net


class Recorder:
    """What is waited for, and all that is not waited for after that."""

    def __init__(self) -> None:
        self.calls: list[Sequence[int] | None] = []

    def __call__(self, buckets: Sequence[int] | None) -> None:
        self.calls.append(buckets)

    def take(self) -> list[int]:
        buckets = [b for call in self.calls for b in call]
        self.calls = []
        return list(dict.fromkeys(buckets))


def test_parameters_are_waited_for_by_the_innermost_module_that_is_called():
    model, wait = net(), Recorder()
    waits = ForwardWaits(model, wait)
    model(batch(0, 0))
    assert wait.calls == []
    parameters = [p for p in model.parameters() if p.requires_grad]
    order = waits.assign({p: number for number, p in enumerate(parameters)})
    names = {p: name for name, p in model.named_parameters()}
    # bias is the root's own. dense is not called, so its block waits for it.
    first = ["bias", "words.weight", "blocks.0.dense.weight", "blocks.0.dense.bias"]
    assert [names[parameters[number]] for number in order[:4]] == first
    assert sorted(order) == list(range(len(parameters)))
    seen: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        module.register_forward_pre_hook(
            lambda *_, name=name: seen.update({name: [names[parameters[b]] for b in wait.take()]})
        )
    model(batch(0, 1))
    assert seen[""] == ["bias"]
    assert seen["words"] == ["words.weight"]
    assert seen["blocks.1"] == ["blocks.1.dense.weight", "blocks.1.dense.bias"]
    assert seen["blocks.1.out"] == ["blocks.1.out.weight"]
    assert seen["frozen"] == []
    assert seen["spare"] == ["spare.weight", "spare.bias"]


def test_a_module_that_was_not_called_leaves_its_parameters_to_its_parent():
    model, wait = net(), Recorder()
    waits = ForwardWaits(model, wait)
    model(batch(0, 0), False)
    waits.assign({model.spare.weight: 0, model.bias: 1})
    model(batch(0, 1), True)
    assert wait.calls[0] == [0, 1]


def test_parameters_of_no_called_module_are_waited_for_by_all():
    model, wait = net(), Recorder()
    waits = ForwardWaits(model, wait)
    model.spare(torch.ones(7))
    assert waits.assign({model.bias: 0, model.spare.bias: 1}) == [0, 1]
    model.spare(torch.ones(7))
    assert wait.calls == [[0, 1]]


def test_state_dicts_wait_for_everything_and_copies_for_nothing():
    model, wait = net(), Recorder()
    waits = ForwardWaits(model, wait)
    model(batch(0, 0))
    waits.assign(dict.fromkeys(model.parameters(), 0))
    other = copy.deepcopy(model)
    other(batch(0, 0))
    other.state_dict()
    assert wait.calls == []
    model.blocks[0].state_dict()
    assert set(wait.calls) == {None}


class Borrower(nn.Module):
    """Has a module as an attribute, which is no submodule."""

    def __init__(self, lender: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "lender", lender)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.lender.weight


def test_what_is_borrowed_is_waited_for_too():
    lender, wait = nn.Linear(7, 7), Recorder()
    model = nn.Sequential(Borrower(lender), lender)
    waits = ForwardWaits(model, wait)
    model(torch.ones(2, 7))
    assert waits.assign({lender.weight: 1, lender.bias: 0}) == [0, 1]
    seen: list[list[int]] = []
    for module in model:
        module.register_forward_pre_hook(lambda *_: seen.append(wait.take()))
    model(torch.ones(2, 7))
    assert seen == [[0, 1], [0, 1]]


def test_nothing_of_bert_is_left_to_the_whole_model():
    """Else the first layers would wait for what only the last ones use."""
    config = BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=8,
    )  # fmt: skip
    model, wait = BertForPreTraining(config), Recorder()
    waits = ForwardWaits(model, wait)
    inputs = PackedInputs.build(VarlenBatch.from_lengths([]), torch.empty(0, dtype=torch.int64))
    model(inputs)
    parameters = list(model.parameters())
    waits.assign({p: number for number, p in enumerate(parameters)})
    before: dict[nn.Module, list[int]] = {}
    for module in model.modules():
        module.register_forward_pre_hook(lambda m, _: before.update({m: wait.take()}))
    model(inputs)
    outer = (model, model.bert, model.bert.encoder)
    assert [before[module] for module in outer] == [[]] * 3
    assert sorted(b for buckets in before.values() for b in buckets) == list(range(len(parameters)))
