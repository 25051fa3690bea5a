"""Length groups in a model and in the trainer: attention gets those of its batch, both passes."""

import copy
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bert_unpad.nn import BertForPreTraining
from tests.nn.test_bert import backward, make_inputs, make_model
from tests.support.seeds import derived

LENGTHS = [150, 9, 70, 0, 131]


class Recorder(TorchDispatchMode):
    """Notes the groups that attention is called with, None for none."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list] = {"varlen_attention": [], "varlen_attention_backward": []}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "bert_unpad" and name in self.calls:
            place = [argument.name for argument in func._schema.arguments].index("groups")
            # Defaults at the end of the arguments are left out.
            self.calls[name].append(args[place] if place < len(args) else None)
        return func(*args, **(kwargs or {}))


@contextmanager
def recorded():
    with Recorder() as recorder:
        yield recorder.calls


def model_of(schedule: str, **changes) -> BertForPreTraining:
    model = make_model(num_hidden_layers=3, max_position_embeddings=200, **changes)
    model.bert.encoder.attention_schedule = schedule
    return model


@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_attention_gets_the_groups_of_its_batch(recompute):
    results = []
    for schedule in ("list", "groups"):
        model = model_of(schedule, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2)
        model.bert.encoder.recompute = recompute
        inputs = make_inputs(LENGTHS)
        torch.manual_seed(derived(3))
        with recorded() as calls:
            results.append(backward(model, inputs))
        assert all(len(groups) >= 2 for groups in calls.values())
        for groups in calls.values():
            for given in groups:
                if schedule == "list":
                    assert given is None
                else:
                    assert torch.equal(given, inputs.batch.group_sizes)
                    assert given.shape[0] > 1
    (first, want), (second, got) = results
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, want.values(), got.values()))


def test_copies_and_new_layers_keep_the_schedule():
    encoder = model_of("groups").bert.encoder
    encoder.layer.append(copy.deepcopy(encoder.layer[0]))
    assert [layer.attention.self.schedule for layer in encoder.layer] == ["groups"] * 4
    encoder.attention_schedule = "list"
    assert [layer.attention.self.schedule for layer in encoder.layer] == ["list"] * 4
    assert encoder.attention_schedule == "list"
    with pytest.raises(ValueError, match="attention_schedule: expected list or groups, got 'all'"):
        encoder.attention_schedule = "all"


def test_under_torch_compile():
    model = model_of("groups").eval()
    torch._dynamo.reset()
    compiled = torch.compile(model.bert.encoder, fullgraph=True, backend="aot_eager", dynamic=True)
    for seed, lengths in enumerate((LENGTHS, [60, 140, 199, 3])):
        batch = make_inputs(lengths, seed).batch
        assert batch.group_sizes.shape[0] > 1
        x = torch.randn(batch.total, model.config.hidden_size)
        torch.testing.assert_close(compiled(x, batch), model.bert.encoder(x, batch))


class TestInTheTrainer:
    @pytest.fixture(autouse=True)
    def _trainer(self):
        for package in ("tqdm", "jsonargparse"):
            pytest.importorskip(package, reason="the trainer needs the extra `pretrain`")

    def _config(self, *arguments):
        from bert_unpad.pretrain.config import read_config

        needed = ["--batching.global_batch_size", "8", "--schedule.total_steps", "10"]
        small = ["--model.num_hidden_layers", "3", "--model.hidden_size", "32"]
        small += ["--model.num_attention_heads", "2", "--model.intermediate_size", "48"]
        return read_config([*needed, *small, *arguments])[0]

    @pytest.mark.parametrize("schedule", ["list", "groups"])
    def test_passes_and_evaluations(self, schedule):
        from bert_unpad.pretrain.model import build_model, to_device

        config = self._config("--attention_schedule", schedule)
        model = build_model(config, 100, 200)
        inputs = make_inputs(LENGTHS)
        moved = to_device(inputs, model, torch.device("cpu"))
        # So that torch.compile has nothing left to trace there.
        assert ("group_sizes" in vars(moved.batch)) == (schedule == "groups")
        with recorded() as calls:
            model(moved)
        assert len(calls["varlen_attention"]) == 2
        assert all((x is not None) == (schedule == "groups") for x in calls["varlen_attention"])

    def test_what_it_cannot_be_used_with(self):
        from bert_unpad.pretrain.config import ConfigError

        with pytest.raises(ConfigError, match="attention_schedule: expected list with cuda_graphs"):
            self._config("--attention_schedule", "groups", "--cuda_graphs", "true")
        with pytest.raises(ConfigError, match="attention_schedule: expected one of list, groups"):
            self._config("--attention_schedule", "all")
