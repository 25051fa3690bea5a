"""torch.func and forward-mode derivatives of a swapped model run the stock modules, and say so."""

import pytest
import torch
from torch.func import functional_call, grad, jvp, vmap

from bert_unpad import hf
from bert_unpad.hf import fallback
from tests.support.hf_models import MASKS, call_arguments, clone, make
from tests.support.tolerances import assert_same_values

HEADS = (
    "BertForMaskedLM",
    "BertForSequenceClassification",
    "DistilBertForTokenClassification",
    "RobertaForQuestionAnswering",
)


def derivatives(model, call: dict, how: str):
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, call):
        return functional_call(model, parameters, (), call, tie_weights=False).loss

    def one(parameters, example):
        return loss(parameters, {key: value[None] for key, value in example.items()})

    if how == "grad":
        return grad(loss)(parameters, call)
    if how == "gradient of each example":
        return vmap(grad(one), (None, 0))(parameters, call)
    tangents = {name: torch.ones_like(p) for name, p in parameters.items()}
    return list(jvp(lambda parameters: loss(parameters, call), (parameters,), (tangents,)))


@pytest.mark.parametrize("how", ["grad", "jvp", "gradient of each example"])
@pytest.mark.parametrize("name", HEADS)
def test_equal_stock(name, how, packed_calls, monkeypatch):
    stock = make(name, attention="eager", problem_type="single_label_classification")
    ours = hf.unpad(clone(stock), logits="none")
    # Stock looks for padding in a mask, which vmap does not allow.
    call = call_arguments(name, MASKS["right"] if how in ("grad", "jvp") else None)
    call = {key: value for key, value in call.items() if value is not None}
    want = derivatives(stock, call, how)
    monkeypatch.setattr(fallback, "_said", set())
    with pytest.warns(hf.StockFallbackWarning, match="torch.func and forward-mode"):
        got = derivatives(ours, call, how)
    assert_same_values(got, want)
    assert packed_calls == []
    ours(**call)  # afterwards as ever
    assert packed_calls
