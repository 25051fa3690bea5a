"""Layers as one operator where nothing is trained, in fp32 and in 8 bits."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

pytest.importorskip("transformers", minversion="5.0")

from bert_unpad import hf
from bert_unpad.hf import inference
from tests.support.hf_models import MASKS, call_arguments, clone, make
from tests.support.tolerances import assert_same_values

MASK = MASKS["right"]
NAMES = ["BertModel", "BertForSequenceClassification", "DistilBertModel", "RobertaForMaskedLM"]


@pytest.fixture
def whole_layers(monkeypatch) -> list[bool]:
    """Grows by whether its weights are in 8 bits with every layer that is one operator."""
    calls: list[bool] = []
    layer = inference.encoder_layer

    def encoder_layer(x, cu_seqlens, longest, parameters, *args, **kwargs):
        calls.append(parameters[0].dtype == torch.uint8)
        return layer(x, cu_seqlens, longest, parameters, *args, **kwargs)

    monkeypatch.setattr(inference, "encoder_layer", encoder_layer)
    return calls


def first(model: nn.Module, call: dict[str, Any]) -> torch.Tensor:
    return model(**call)[0]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_stock_model(name, mode, whole_layers):
    stock, call = make(name).eval(), call_arguments(name, MASK, labels=False)
    ours = hf.unpad(clone(stock))
    with mode():
        found, want = first(ours, call), first(stock, call)
    if name != "BertForSequenceClassification":
        found, want = (x[call["attention_mask"] == 1] for x in (found, want))
    assert_same_values(found, want)
    assert whole_layers == [False, False]


@pytest.mark.parametrize("name", NAMES)
def test_8_bits(name, whole_layers):
    stock, call = make(name).eval(), call_arguments(name, MASK, labels=False)
    ours = hf.unpad(clone(stock), weights="int8")
    with torch.inference_mode():
        found, want = first(ours, call), first(stock, call)
        again = first(pickle.loads(pickle.dumps(copy.deepcopy(ours))), call)
    assert torch.equal(found, again)
    if name != "BertForSequenceClassification":
        found, want = (x[call["attention_mask"] == 1] for x in (found, want))
    assert functional.cosine_similarity(found.flatten(), want.flatten(), dim=0) > 0.999
    assert not torch.equal(found, want)
    assert whole_layers == [True] * 4
    assert list(ours.state_dict()) == list(stock.state_dict())
    hf.repad(ours)
    with torch.inference_mode():
        assert torch.equal(first(ours, call), first(stock, call))
    assert whole_layers == [True] * 4


def test_weights_that_change_are_rounded_again(whole_layers):
    call = call_arguments("BertModel", MASK)
    ours = hf.unpad(make("BertModel").eval(), weights="int8")
    with torch.no_grad():
        before = first(ours, call)
        ours.encoder.layer[1].output.dense.weight.mul_(2.0)
        changed = first(ours, call)
        fresh = first(hf.unpad(hf.repad(clone(ours)), weights="int8"), call)
    assert not torch.equal(before, changed)
    assert torch.equal(changed, fresh)


def test_what_the_operator_cannot_do_is_left_to_the_modules(whole_layers):
    stock, call = make("BertModel").eval(), call_arguments("BertModel", MASK)
    ours = hf.unpad(clone(stock), weights="int8")
    real = call["attention_mask"] == 1

    def same(expected: int) -> None:
        del whole_layers[:]
        with torch.no_grad():
            assert_same_values(first(ours, call)[real], first(stock, call)[real])
        assert len(whole_layers) == expected

    layers = ours.encoder.layer
    first(ours, call)  # gradients
    assert not whole_layers
    hooks = [layer.intermediate.dense.register_forward_hook(lambda *_: None) for layer in layers]
    same(0)
    for hook in hooks:
        hook.remove()

    class Half(nn.Linear):
        def forward(self, x):
            return super().forward(x) / 2

    for model in (ours, stock):
        for layer in model.encoder.layer:
            layer.output.dense.__class__ = Half
    same(0)
    for model in (ours, stock):
        for layer in model.encoder.layer:
            layer.output.dense.__class__ = nn.Linear
    ours.train()
    for module in ours.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    same(0)
    ours.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        first(ours, call)
    assert not whole_layers


def test_calibration_keeps_layers_that_lose_too_much(whole_layers):
    call = call_arguments("BertModel", MASK)
    stock = make("BertModel").eval()
    with (
        torch.no_grad()
    ):  # one feature of all tokens is so large that nothing is left of the others
        stock.encoder.layer[1].intermediate.dense.bias[3] = 3000.0
        stock.encoder.layer[1].output.dense.weight[:, 3] = 0.0
    ours = hf.unpad(clone(stock), weights="int8")
    cosines = hf.calibrate(ours, call, 0.999)
    assert list(cosines) == ["encoder.layer.0", "encoder.layer.1"]
    assert cosines["encoder.layer.0"] > 0.999 > cosines["encoder.layer.1"]
    del whole_layers[:]
    with torch.no_grad():
        first(ours, call)
    assert whole_layers == [True, False]
    assert not any(layer._forward_hooks for layer in ours.encoder.layer)
    assert list(hf.calibrate(ours, call)) == ["encoder.layer.0"]
    with pytest.raises(ValueError, match="expected one with layers in 8 bits"):
        hf.calibrate(hf.unpad(stock), call)


def test_errors():
    with pytest.raises(ValueError, match="weights: expected one of float32, int8, got 'int4'"):
        hf.unpad(make("BertModel"), weights="int4")
    with pytest.raises(ValueError, match="verify: expected False with weights='int8'"):
        hf.unpad(make("BertModel"), weights="int8", verify=True)
    text = 'weights: expected "float32" for this model, because of layer encoder.layer.0: '
    with pytest.raises(ValueError, match=text + "its parameters are not float32 on a CPU"):
        hf.unpad(make("BertModel").bfloat16(), weights="int8")
    model = make("DebertaV2Model")
    with pytest.raises(ValueError, match=text + "its attention counts distances of tokens"):
        hf.unpad(model, weights="int8")
    assert not any("_bert_unpad_weights" in vars(module) for module in model.modules())
    model = make("BertModel")
    with torch.no_grad():
        model.encoder.layer[0].output.dense.weight[2, 2] = torch.nan
    with pytest.raises(RuntimeError, match="weight must be finite, but row 2 is not"):
        hf.unpad(model, weights="int8")
