"""The last layer computes only the rows that a head reads, and nobody can tell by the numbers."""

import pytest
import torch
from torch.nn import functional

from bert_unpad import hf
from tests.support.hf_models import (
    MASKS,
    assert_same_step,
    call_arguments,
    clone,
    make,
    run,
)
from tests.support.seeds import derived
from tests.support.tolerances import assert_same_values

MASK = MASKS["right"]
LENGTHS = MASK.sum(1)
LABELLED = ("BertForMaskedLM", "BertForPreTraining", "RobertaForMaskedLM", "DistilBertForMaskedLM")
FIRST = (
    "BertForSequenceClassification", "BertForMultipleChoice", "BertForNextSentencePrediction",
    "RobertaForSequenceClassification", "RobertaForMultipleChoice",
    "ElectraForSequenceClassification", "DistilBertForSequenceClassification",
    "DistilBertForMultipleChoice",
)  # fmt: skip


@pytest.fixture
def ffn_rows(monkeypatch):
    """Watches how many rows the feed-forward half of each layer computes."""
    from bert_unpad.hf import plain_modules

    rows = []
    original = plain_modules.activated

    def activated(linears, activation, x):
        rows.append(x.shape[:-1].numel())
        return original(linears, activation, x)

    monkeypatch.setattr(plain_modules, "activated", activated)
    return rows


@pytest.mark.parametrize("name", LABELLED)
def test_rows_with_labels(name, ffn_rows):
    ours = hf.unpad(make(name))
    call = call_arguments(name, MASK)
    call["labels"][0, 0] = 5  # a first token is read twice, and computed once
    wanted = call["labels"] != -100
    if name == "BertForPreTraining":
        wanted[:, 0] = True
    ours(**call)
    tokens = int(MASK.sum())
    assert ffn_rows == [tokens, int(wanted.sum())]
    ffn_rows.clear()
    ours.eval()(**call)  # where logits are often read
    hf.unpad(ours.train(), logits="full")(**call)
    assert ffn_rows == [tokens] * 4
    ffn_rows.clear()
    hf.unpad(ours.eval(), logits="none")(**call)
    assert ffn_rows == [tokens, int(wanted.sum())]


@pytest.mark.parametrize("name", FIRST)
def test_rows_of_the_first_column(name, ffn_rows):
    ours = hf.unpad(make(name))
    ours(**call_arguments(name, MASK))
    copies = 2 if name.endswith("MultipleChoice") else 1
    assert ffn_rows == [copies * int(MASK.sum()), copies * len(LENGTHS)]


@pytest.mark.parametrize("logits", ["lazy", "none"])
@pytest.mark.parametrize("count", [0, 1, None])
def test_any_number_of_labels(logits, count):
    """No label, one, and every token of the batch, first ones included."""
    stock = make("BertForPreTraining")
    ours = hf.unpad(clone(stock), logits=logits)
    call = call_arguments("BertForPreTraining", MASK)
    labels = call["input_ids"].masked_fill(MASK == 0, -100)
    call["labels"] = labels if count is None else torch.full_like(labels, -100)
    if count == 1:
        call["labels"][2, 3] = 7
    got, want = run(ours, call), run(stock, call)
    if count == 0:
        assert got[0]["loss"].isnan()
        assert want[0]["loss"].isnan()
        return
    fields = {"prediction_logits"} if logits == "none" else set()
    want = {k: v for k, v in want[0].items() if k not in fields}, want[1]
    assert_same_step(got, want, MASK)


def test_logits_read_in_training_are_those_of_the_loss():
    """With dropout, the last layer's masks at labelled rows are the ones that the loss has seen."""
    ours = hf.unpad(make("BertForMaskedLM", dropout=0.3))
    call = call_arguments("BertForMaskedLM", MASK)
    out = ours(**call)
    loss = functional.cross_entropy(out.logits.flatten(0, 1), call["labels"].flatten())
    assert_same_values(loss, out.loss)
    again = ours(**call)
    assert not torch.equal(again.logits, out.logits)
    loss.backward()
    assert ours.bert.encoder.layer[1].attention.self.query.weight.grad.norm() > 0


def test_who_looks_at_all_columns_sees_them(ffn_rows):
    """A hook on the base model, its direct use, and a classifier of the user's own."""
    call = call_arguments("RobertaForSequenceClassification", MASK)
    stock = make("RobertaForSequenceClassification")
    tokens = int(MASK.sum())
    ours = hf.unpad(clone(stock))
    seen = []
    handle = ours.roberta.register_forward_hook(lambda m, args, out: seen.append(out[0].shape))
    ours(**call)
    handle.remove()
    assert seen == [(*MASK.shape, 64)]
    base = {key: value for key, value in call.items() if key != "labels"}
    assert ours.roberta(**base)[0].shape == (*MASK.shape, 64)

    class Mean(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x[:, :1].mean(1) + x[:, 1:2].mean(1))

    torch.manual_seed(derived(0))
    stock.classifier = Mean(64, 3)
    call["attention_mask"] = torch.ones_like(MASK)
    ours = hf.unpad(clone(stock))
    assert_same_step(run(ours, call), run(stock, call), None)
    assert ffn_rows == [tokens] * 4 + [MASK.numel()] * 2
