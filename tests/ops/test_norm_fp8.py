"""The norm that rounds its result to 8 bits too: the bits of two steps, alone and in models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from bert_unpad import ops
from bert_unpad.nn import norms
from bert_unpad.ops.delayed_scaling import DelayedScale, LinearScales
from bert_unpad.ops.fp8 import RoundedInput, quantize_by
from bert_unpad.ops.norm_fp8 import dropout_add_norm_fp8
from tests.nn.test_bert import make_inputs, make_model
from tests.support.fp8_training import SIZES as TRAINED_SIZES
from tests.support.fp8_training import train
from tests.support.op_checks import RNG
from tests.support.seeds import derived


def noted(scale: float) -> DelayedScale:
    return DelayedScale(torch.tensor(scale), torch.zeros(1024))


def leaves_of(rows: int, hidden: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x, residual, weight, bias, x_bias."""
    torch.manual_seed(derived(0))
    activations = torch.randn(2, rows, hidden).to(dtype)
    return [t.clone().requires_grad_() for t in (*activations, *torch.randn(3, hidden))]


def separately(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, scale: DelayedScale, *,
    rms: bool, **settings: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`dropout_add_norm_fp8` that leaves rounding to the layer that takes its result."""
    if rms:
        return ops.dropout_add_rms_norm(x, residual, weight, **settings)
    return ops.dropout_add_layer_norm(x, residual, weight, bias, **settings)


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("return_sum", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 37])
def test_the_bits_are_those_of_two_steps(rows, dtype, return_sum, rms):
    results = []
    for function in (dropout_add_norm_fp8, separately):
        *leaves, x_bias = leaves_of(rows, 48, dtype)
        leaves[3] = None if rms else leaves[3]
        settings = {"x_bias": x_bias, "rng": RNG, "dropout_p": 0.1, "eps": 1e-5}
        settings["return_sum"] = return_sum
        scale = noted(0.003)  # too small for some
        found = function(*leaves, scale, rms=rms, **settings)
        total, y = found if return_sum else (None, found)
        if isinstance(y, RoundedInput):
            y, (q, kept, same) = y
            assert same is scale.scale
        else:
            q, kept, _ = quantize_by(y.detach(), False, True, scale)
        loss = y.square().sum() + (0 if total is None else total.sum())
        loss.backward()
        tensors = [y, *([] if total is None else [total]), scale.largest.max()]
        tensors += [t.view(torch.uint8) for t in (q, kept)]
        results.append([*tensors, *(t.grad for t in (*leaves, x_bias) if t is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_without_gradients_only_what_is_asked_for():
    scale = noted(0.01)
    with torch.no_grad():
        y, (q, kept, _) = dropout_add_norm_fp8(*leaves_of(5, 16)[:4], scale)
    assert q.shape == y.shape
    assert kept.shape == (0, 0)
    assert not scale.largest.any()


@pytest.mark.parametrize("largest", [torch.zeros(1024), None])
def test_operator(largest):
    x, residual, weight, bias, x_bias = (t.detach() for t in leaves_of(5, 16))
    arguments = (x, x_bias, residual, weight, bias, 0.1, 1e-5, RNG, False, True)
    # The schema's test multiplies results, which PyTorch cannot in 8 bits.
    opcheck(
        torch.ops.bert_unpad.dropout_add_layer_norm_fp8.default,
        (*arguments, torch.ones(()), largest, True),
        test_utils="test_faketensor",
    )


def linear(x: Tensor | RoundedInput, scales: LinearScales, weights: list[Tensor]) -> Tensor:
    return ops.fp8_linear(x, weights[0], None, scales)


def mlp(x: Tensor | RoundedInput, scales: LinearScales, weights: list[Tensor]) -> Tensor:
    both = scales, LinearScales(noted(0.01), noted(1e-3))
    y, same = ops.mlp(x, weights[0], None, weights[1], fp8=True, scales=both)
    return y + same


def glu_mlp(x: Tensor | RoundedInput, scales: LinearScales, weights: list[Tensor]) -> Tensor:
    both = scales, LinearScales(noted(0.01), noted(1e-3))
    y, same = ops.glu_mlp(x, weights[0], None, weights[1][:, :32], fp8=True, scales=both)
    return y + same


@pytest.mark.parametrize("layer", [linear, mlp, glu_mlp])
def test_layers_take_what_is_rounded(layer: Callable[..., Tensor]):
    results = []
    for rounded in (True, False):
        torch.manual_seed(derived(1))
        x, *weights = (
            torch.randn(shape).requires_grad_() for shape in ((37, 32), (64, 32), (32, 64))
        )
        scales = LinearScales(noted(0.02), noted(1e-3))
        given = x
        if rounded:
            found = quantize_by(x.detach(), False, True, scales.input)
            given = RoundedInput(x, found)
        y = layer(given, scales, weights)
        y.sum().backward()
        noted_values = [each.largest.max() for each in scales]
        gradients = [t.grad for t in (x, *weights) if t.grad is not None]
        results.append([y.detach(), *gradients, *noted_values])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "hidden_dropout_prob": 0.1,
}
PRE_NORM = {
    "model_type": "bert_unpad",
    "norm_place": "pre",
    "norm": "rms_norm",
    "norm_bias": False,
    "embedding_dropout_prob": 0.0,
    "feed_forward": "glu",
    "hidden_act": "silu",
}


def step(changes: dict[str, Any], settings: dict[str, Any]) -> list[Tensor]:
    """Losses, gradients and largest values of two steps of a model."""
    model = make_model(**SIZES, **changes).train()
    encoder = model.bert.encoder
    encoder.fp8 = True
    for name, value in settings.items():
        setattr(encoder, name, value)
    for layer in encoder.layer[: encoder.frozen_layers]:
        layer.requires_grad_(False)
    scaling = encoder.delay_scaling()
    found: list[Tensor] = []
    for seed in range(2):
        torch.manual_seed(derived(seed))
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(make_inputs())
        (out.mlm_loss_sum + out.nsp_loss_sum).backward()
        found += [out.mlm_loss_sum.detach()]
        found += [p.grad for p in model.parameters() if p.grad is not None]
        scales = (scaling[n] for n in range(4 * len(encoder.layer)))
        found += [each.largest.max() for pair in scales for each in pair]
        scaling.update()
    return found


@pytest.mark.parametrize(
    ("changes", "settings", "count"),
    [
        # The norm between the halves of each layer, and those between layers.
        ({}, {}, 4 + 3),
        ({}, {"recompute": "gelu"}, 4 + 3),
        # Twice, and nothing between layers.
        ({}, {"recompute": "layer"}, 2 * 4),
        ({}, {"active_layers": [True, False, True, True]}, 3 + 2),
        ({}, {"frozen_layers": 2}, 4 + 1),
        ({"num_hidden_groups": 1, "model_type": "bert_unpad"}, {}, 4 + 3),
        (PRE_NORM, {}, 4 + 3),
    ],
    ids=["bert", "gelu", "layer", "active", "frozen", "shared", "pre_norm"],
)
def test_a_model_gets_the_bits_of_two_steps(monkeypatch, changes, settings, count):
    calls = []

    def counted(*args: Any, **more: Any) -> RoundedInput | tuple[Tensor, RoundedInput]:
        calls.append(args)
        return dropout_add_norm_fp8(*args, **more)

    results = []
    for function in (counted, separately):
        monkeypatch.setattr(norms, "dropout_add_norm_fp8", function)
        results.append(step(changes, settings))
    assert len(calls) == 2 * count
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert len(results[0]) > 20


def test_training_has_the_losses_of_two_steps(monkeypatch):
    """With scales that come from earlier updates, which the largest values change."""
    losses = []
    for function in (dropout_add_norm_fp8, separately):
        monkeypatch.setattr(norms, "dropout_add_norm_fp8", function)
        torch.manual_seed(derived(0))
        model = make_model(**TRAINED_SIZES, hidden_dropout_prob=0.1)
        losses.append(train(model, make_inputs(), fp8=True, window=3))
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]
