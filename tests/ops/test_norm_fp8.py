"""The norm that rounds its result to 8 bits too: the bits of two steps, alone and in models."""

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
from tests.support.backends import Backend
from tests.support.fp8_training import SIZES as TRAINED_SIZES
from tests.support.fp8_training import noted, train
from tests.support.op_checks import RNG, assert_same_numbers
from tests.support.seeds import derived


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


# A row; turns of 16 rows, of which a block has three; one, three and four groups of columns a lane;
# rows of a block, which take two kernels, as fp32 ones of more than 256 columns do.
SHAPES = [
    *[(0, 16), (1, 16), (150, 16), (33, 256), (70, 528), (40, 1024), (5, 1040)],
    *(
        pytest.param(shape, marks=pytest.mark.backends("cuda"))
        for shape in ((3000, 64), (4097, 768), (5000, 1024))
    ),
]


def results_of(
    function: Callable, inputs: list[Tensor | None], scale: DelayedScale, *, return_sum: bool,
    **settings: Any,
) -> list[Tensor]:  # fmt: skip
    """Results, gradients of the inputs (x, residual, weight, bias, x_bias), the largest value."""
    *leaves, x_bias = [None if t is None else t.detach().requires_grad_() for t in inputs]
    found = function(*leaves, scale, x_bias=x_bias, return_sum=return_sum, **settings)
    total, y = found if return_sum else (None, found)
    if isinstance(y, RoundedInput):
        y, (q, kept, same) = y
        assert same is scale.scale
    else:
        q, kept, _ = quantize_by(y.detach(), False, True, scale)
    loss = y.float().square().sum() + (0 if total is None else total.sum())
    loss.backward()
    gradients = [t.grad for t in (*leaves, x_bias) if t is not None]
    return [y, *([] if total is None else [total]), q, kept, *gradients, scale.largest.max()]


@pytest.mark.sanitizer
@pytest.mark.parametrize(
    ("rms", "return_sum", "p", "bare"),
    [
        pytest.param(False, False, 0.1, False, id="layer_norm"),
        pytest.param(True, True, 0.1, False, id="rms_norm-sum"),
        pytest.param(False, True, 0.0, True, id="layer_norm-sum-bare"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_bits_are_those_of_two_steps(
    backend: Backend, shape: tuple[int, int], dtype: torch.dtype, rms: bool, return_sum: bool,
    p: float, bare: bool,
) -> None:  # fmt: skip
    inputs: list[Tensor | None] = backend.put([t.detach() for t in leaves_of(*shape, dtype)])
    inputs[3] = None if rms or bare else inputs[3]
    inputs[4] = None if bare else inputs[4]
    settings = {"rng": backend.put(RNG), "dropout_p": p, "eps": 1e-5, "rms": rms}
    settings["return_sum"] = return_sum

    def run(function: Callable) -> list[Tensor]:  # by a scale too small for some
        scale = DelayedScale(*backend.put(tuple(noted(0.003))))
        return results_of(function, inputs, scale, **settings)

    want = run(separately)
    once = return_sum or backend.name == "cpu"
    for _ in [None] if once else backend.schedules_and_sizes():
        got = run(dropout_add_norm_fp8)
        assert_same_numbers(got[:5], want[:5])
        assert_same_numbers(got, run(separately))  # the size orders sums over rows


@pytest.mark.parametrize("hidden", [64, 1040])
def test_odd_values(backend: Backend, hidden: int) -> None:
    """Values too large for the scale, for y's dtype, and not finite ones."""
    inputs = [t.detach() for t in leaves_of(20, hidden, torch.bfloat16)]
    inputs[0][3, 5], inputs[0][0, 3] = torch.nan, 30
    inputs[2][3], inputs[2][9] = 3e38, 1e3
    inputs = backend.put(inputs)
    with torch.no_grad():
        y = ops.dropout_add_layer_norm(*inputs[:4], x_bias=inputs[4], eps=1e-5)
    assert y.isinf().any()
    scales = [DelayedScale(*backend.put(tuple(noted(0.01)))) for _ in range(2)]
    q, kept, _ = quantize_by(y, False, True, scales[0])
    assert (q.float() == 448).any()
    got, rounded = dropout_add_norm_fp8(*inputs[:4], scales[1], x_bias=inputs[4], eps=1e-5)
    assert_same_numbers([got, *rounded[:2]], [y, q, kept])
    assert scales[1].largest.max() == scales[0].largest.max() == torch.inf


def test_the_largest_value_is_kept(backend: Backend) -> None:
    inputs = backend.put([t.detach() for t in leaves_of(20, 32)])
    own = ops.dropout_add_layer_norm(*inputs[:4]).abs().max()
    for before in (50.0, 1e-3):
        scale = DelayedScale(*backend.put(tuple(noted(0.01))))
        scale.largest[0] = before
        dropout_add_norm_fp8(*inputs[:4], scale)
        assert scale.largest.max() == max(own.item(), before)


def test_without_gradients_only_what_is_asked_for(backend: Backend) -> None:
    scale = DelayedScale(*backend.put(tuple(noted(0.01))))
    with torch.no_grad():
        y, (q, kept, _) = dropout_add_norm_fp8(*backend.put(leaves_of(5, 16)[:4]), scale)
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
