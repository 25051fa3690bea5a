"""Scales from earlier updates: the published rule, window, saved state; GELU that uses them."""

import json
import math
import random

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.library import opcheck

from bert_unpad import ops
from bert_unpad.ops.delayed_scaling import DelayedScale, DelayedScaling, LinearScales
from bert_unpad.ops.fp8 import quantize_by, quantize_fp8
from bert_unpad.ops.gelu_fp8 import bias_gelu_fp8, bias_gelu_fp8_backward
from tests.nn.test_bert import make_inputs, make_model
from tests.support.fp8_training import SIZES, assert_near, noted, train
from tests.support.linear_cases import draw
from tests.support.processes import run_ranks
from tests.support.seeds import derived

LARGEST = (448.0, 57344.0)  # of inputs and gradients


@pytest.mark.parametrize("window", [1, 3, 1024])
def test_the_rule(window):
    """As Transformer Engine documents it, written out; resumed in the middle."""
    draws, scaling = random.Random(derived(window)), DelayedScaling(2, window)
    histories: list[list[float]] = [[] for _ in range(4)]
    scales = 4 * [1.0]
    for step in range(12):
        for number in range(4):
            scale, largest = scaling[number // 2][number % 2]
            assert scale.item() == pytest.approx(scales[number])
            values = draws.choices([draws.uniform(0, 9), 1e-3, 0.0, math.inf], [8, 2, 2, 1], k=3)
            for place, value in zip((0, 700, 1023), values, strict=True):
                largest[place] = value
            newest = max(values) if math.isfinite(max(values)) else 0.0
            histories[number] = [newest, *histories[number]][:window]
            if max(histories[number]) > 0:
                scales[number] = max(histories[number]) / LARGEST[number % 2]
        scaling.update()
        assert not any(each.largest.any() for layer in range(2) for each in scaling[layer])
        if step == 7:
            state = json.loads(json.dumps(scaling.state_dict()))
            scaling = DelayedScaling(2, window)
            scaling.load_state_dict(state)


def _scales_of_rank(rank: int, _: int) -> list[float]:
    scaling = DelayedScaling(1, window=2)
    for update in range(3):
        scaling[0].input.largest[5] = 1.0 + (rank + update) % 3
        # One rank's value that is not finite: the update counts on no rank.
        scaling[0].gradient.largest[0] = math.inf if rank == update == 1 else 3.0 - rank
        scaling.update(dist.group.WORLD)
    assert not any(each.largest.any() for each in scaling[0])
    return [each.scale.item() for each in scaling[0]]


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_have_the_scales_of_their_largest(ranks):
    (first, *others) = run_ranks(_scales_of_rank, ranks)
    assert all(scales == first for scales in others)
    assert first == pytest.approx([3.0 / 448, 3.0 / 57344])


def test_states_of_other_sizes():
    scaling = DelayedScaling(1, window=8)
    for value in (5.0, 3.0, 4.0):
        for number in range(2):
            scaling[0][number].largest[3] = value * (number + 1)
        scaling.update()
    state = scaling.state_dict()
    assert state["history"] == [[0, 0, 4.0], [0, 1, 8.0], [2, 0, 5.0], [2, 1, 10.0]]
    other = DelayedScaling(2, window=2)
    other.load_state_dict(state)
    assert other[0].input.scale == torch.tensor(5.0) / 448
    assert other[1].input.scale == 1
    other.update()
    assert other[0].gradient.scale == torch.tensor(8.0) / 57344  # the 10 is too old for its window


def test_tiny_values_have_a_finite_reciprocal():
    scaling = DelayedScaling(1)
    scaling[0].gradient.largest[0] = 1e-44
    scaling.update()
    assert scaling[0].gradient.scale.reciprocal().isfinite()


def test_bad_window():
    with pytest.raises(ValueError, match="window: expected a number >= 1, got 0"):
        DelayedScaling(1, window=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 37])
def test_gelu_in_8_bits(rows, tanh, dtype):
    x, dy, bias = draw((rows, 48), (rows, 48), (48,))
    x, dy = (3 * x).to(dtype), dy.to(dtype)
    u, b = (t.double().requires_grad_() for t in (x, bias))
    y = F.gelu(u + b, approximate="tanh" if tanh else "none")
    y.backward(dy.double())
    scales = noted(0.01), noted(1e-4)
    got = bias_gelu_fp8(x, bias, tanh, scales[0])
    *gradient, dbias = bias_gelu_fp8_backward(dy, x, bias, tanh, scales[1])
    for (q, kept), scale, want in ((got, scales[0], y.detach()), (gradient, scales[1], u.grad)):
        limits = torch.finfo(q.dtype)
        bound = limits.max * scale.scale.item()
        exact = want.clamp(-bound, bound)
        smallest = limits.smallest_normal * limits.eps * scale.scale.item()
        close = {"rtol": limits.eps / 2 * 1.01, "atol": smallest / 2 * 1.01 + 1e-6}
        torch.testing.assert_close(q.double() * scale.scale.double(), exact, **close)
        assert torch.equal(kept[:, :rows].float(), q.float().T)
        assert kept.shape == (48, -(-rows // 16) * 16)
        assert not kept[:, rows:].float().any()
        largest = want.abs().max() if rows else torch.zeros(())
        torch.testing.assert_close(scale.largest.max(), largest.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dbias.double(), b.grad if rows else torch.zeros(48).double(),
                               rtol=1e-5, atol=1e-5)  # fmt: skip


def test_only_what_is_asked_for():
    x, bias = draw((5, 16), (16,))
    scale = noted(1.0)
    silent = scale._replace(largest=None)
    _, kept = bias_gelu_fp8(x, bias, False, silent, transpose=False)
    assert kept.shape == (0, 0)
    assert not scale.largest.any()
    *_, dbias = bias_gelu_fp8_backward(x, x, None, False, scale)
    assert dbias.numel() == 0
    assert scale.largest.any()


def test_values_that_are_too_large_or_not_finite():
    x = torch.full((2, 16), 1000.0)
    x[0, 3], x[1, 4] = torch.inf, torch.nan
    scale = noted(1.0)
    q, _ = bias_gelu_fp8(x, None, False, scale)
    odd = torch.zeros(2, 16, dtype=torch.bool)
    odd[0, 3] = odd[1, 4] = True
    assert q.float()[odd].isnan().all()
    assert (q.float()[~odd] == 448).all()
    assert scale.largest.max() == torch.inf


def test_operators():
    x, bias = draw((5, 16), (16,))
    for largest in (torch.zeros(1024), None):
        more = (x, bias, False, torch.ones(()), largest, True)
        # The schema's test multiplies results, which PyTorch cannot in 8 bits.
        for name, arguments in (("bias_gelu_fp8", more), ("bias_gelu_fp8_backward", (x, *more))):
            operator = getattr(torch.ops.bert_unpad, name).default
            opcheck(operator, arguments, test_utils="test_faketensor")
        for e5m2 in (False, True):
            operator = torch.ops.bert_unpad.quantize_fp8_scaled.default
            for sum in (False, True):
                arguments = (x, e5m2, True, torch.ones(()), largest, sum)
                opcheck(operator, arguments, test_utils="test_faketensor")


@pytest.mark.parametrize("e5m2", [False, True])
def test_a_scale_of_its_own_gives_the_bits_of_current_scaling(e5m2):
    """Where the format's largest number over the largest value is exact."""
    (x,) = draw((37, 48))
    x[3, 5] = 4.0 if e5m2 else 7.0  # 57344 / 4 and 448 / 7
    x.clamp_(-3.9, x.max().item())
    q, kept, scale = quantize_fp8(x, e5m2)
    given = noted(scale.item())
    got, got_kept, same = quantize_by(x, e5m2, True, given)
    assert torch.equal(got.view(torch.uint8), q.view(torch.uint8))
    assert torch.equal(got_kept.view(torch.uint8), kept.view(torch.uint8))
    assert same is given.scale
    assert given.largest.max() == x.max()
    x[3, 5], x[2, 2] = 100.0, torch.nan
    got, _, _ = quantize_by(x, e5m2, False, given)
    assert got.float()[3, 5] == LARGEST[e5m2]
    assert got.float()[2, 2].isnan()
    assert given.largest.max() == 100


def emulated(x: Tensor, scale: DelayedScale, e5m2: bool = False) -> Tensor:
    q, _, scale = quantize_by(x, e5m2, False, scale)
    return q.double() * scale.double()


def scaled() -> tuple[LinearScales, LinearScales]:
    return LinearScales(noted(0.02), noted(1e-3)), LinearScales(noted(0.01), noted(2e-3))


def weight_in_8_bits(weight: Tensor) -> Tensor:
    q, _, scale = quantize_fp8(weight.detach(), False, False)
    return q.double() * scale.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_is_made_of_the_rounded_matrices(dtype):
    x, dy = (t.to(dtype) for t in draw((37, 32), (37, 64)))
    weight, bias = (t.requires_grad_() for t in draw((64, 32), (64,), seed=1))
    x.requires_grad_()
    scales, _ = scaled()
    y = ops.fp8_linear(x, weight, bias, scales)
    y.backward(dy)
    wide, low = emulated(x.detach(), scales.input), emulated(dy, scales.gradient, True)
    w = weight_in_8_bits(weight)
    wanted = [wide @ w.T + bias.detach().bfloat16().double(), low @ w, low.T @ wide]
    for got, exact in zip([y.detach(), x.grad, weight.grad], wanted, strict=True):
        tolerance = 8 * torch.finfo(got.dtype).eps
        torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(bias.grad, dy.float().sum(0))
    assert scales.input.largest.max() == x.abs().max()
    assert scales.gradient.largest.max() == dy.abs().max()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 37])
def test_mlp_is_made_of_the_rounded_matrices(rows, dtype, recompute):
    x, dy = (t.to(dtype) for t in draw((rows, 32), (rows, 32)))
    leaves = [x, *draw((64, 32), (64,), (32, 64), seed=1)]
    leaves = [t.requires_grad_() for t in leaves]
    first, second = scales = scaled()
    y, same = ops.mlp(*leaves, recompute=recompute, fp8=True, scales=scales)
    assert same is leaves[0]
    y.backward(dy)
    weights = [weight_in_8_bits(leaf) for leaf in (leaves[1], leaves[3])]
    wide = [emulated(x.detach(), first.input), *weights]
    pre = (wide[0] @ wide[1].T).to(dtype)
    bias = leaves[2].detach()
    inner = bias_gelu_fp8(pre, bias, False, second.input)[0].double() * 0.01
    low = emulated(dy, second.gradient, True)
    dinner = (low @ wide[2]).to(dtype)
    g, _, dbias = bias_gelu_fp8_backward(dinner, pre, bias, False, first.gradient)
    g = g.double() * 1e-3
    wanted = [inner @ wide[2].T, g @ wide[1], g.T @ wide[0], dbias, low.T @ inner]
    for got, exact in zip([y.detach(), *(t.grad for t in leaves)], wanted, strict=True):
        # A sum that is rounded otherwise may round to another of the 8-bit numbers after it.
        tolerance = 0.02 * max(exact.abs().max().item(), 1e-3) if rows else 0
        torch.testing.assert_close(got.double(), exact.double(), rtol=0, atol=tolerance)


def test_recomputing_gives_the_same_bits():
    results = []
    for recompute in (False, True):
        x, *weights = draw((37, 32), (64, 32), (64,), (32, 64))
        leaves = [t.requires_grad_() for t in (x, *weights)]
        scales = scaled()
        ops.mlp(*leaves, recompute=recompute, fp8=True, scales=scales)[0].sum().backward()
        noted_values = [each.largest for layer in scales for each in layer]
        results.append([*(t.grad for t in leaves), *noted_values])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("recompute", [False, True])
def test_glu_mlp_is_made_of_its_parts(recompute):
    x, weight1, bias1, weight2 = draw((37, 32), (128, 32), (128,), (32, 64))
    results = []
    for whole in (True, False):
        leaves = [t.clone().requires_grad_() for t in (x, weight1, bias1, weight2)]
        first, second = scales = scaled()
        if whole:
            y, _ = ops.glu_mlp(*leaves, recompute=recompute, fp8=True, scales=scales)
        else:
            inner = ops.glu(ops.fp8_linear(*leaves[:2], None, first), "silu", leaves[2])
            y = ops.fp8_linear(inner, leaves[3], None, second)
        y.sum().backward()
        noted_values = [each.largest for layer in scales for each in layer]
        results.append([y, *(t.grad for t in leaves), *noted_values])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_mlp_computes_what_is_asked_for():
    x, weight1, bias1, weight2 = draw((5, 32), (64, 32), (64,), (32, 64))
    for number in range(4):
        leaves = [x.clone(), weight1.clone(), bias1.clone(), weight2.clone()]
        leaves[number].requires_grad_()
        ops.mlp(*leaves, fp8=True, scales=scaled())[0].sum().backward()
        assert [leaf.grad is not None for leaf in leaves] == [i == number for i in range(4)]
    with torch.no_grad():
        y, _ = ops.mlp(x, weight1, None, weight2, fp8=True, scales=scaled())
    assert y.isfinite().all()


def test_a_backward_pass_after_the_update_of_scales_is_an_error():
    x, weight1, weight2 = draw((5, 32), (64, 32), (32, 64))
    scaling = DelayedScaling(2)
    scales = scaling[0], scaling[1]
    y, _ = ops.mlp(x.requires_grad_(), weight1, None, weight2, fp8=True, scales=scales)
    scaling.update()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_bad_input():
    x, weight1, weight2 = draw((5, 32), (64, 32), (32, 64))
    with pytest.raises(ValueError, match="mlp: expected fp8=True with scales, got False"):
        ops.mlp(x, weight1, None, weight2, scales=scaled())
    with pytest.raises(ValueError, match="mlp: weight1 must have multiples of 16"):
        ops.mlp(x, weight1[:40], None, weight2[:, :40], fp8=True, scales=scaled())
    with pytest.raises(ValueError, match="expected weight2"):
        ops.mlp(x, weight1, None, weight2.T, fp8=True, scales=scaled())


def test_a_model_trains():
    """Near bf16, and the same bits whatever is computed again."""
    inputs = make_inputs()
    want = train(make_model(**SIZES), inputs, fp8=False)
    found = [
        train(make_model(**SIZES), inputs, fp8=True, recompute=recompute, window=4)
        for recompute in ("none", "gelu", "layer")
    ]
    assert found[0] == found[1] == found[2]
    assert found[0] != want
    assert found[0][-1] < found[0][0] - 0.1
    assert_near(found[0], want)


def test_an_evaluation_notes_nothing():
    model = make_model(**SIZES)
    encoder = model.bert.encoder
    encoder.fp8 = True
    scaling = encoder.delay_scaling()
    for training in (False, True):
        with torch.set_grad_enabled(training):
            model(make_inputs())
        assert all(bool(scaling[n].input.largest.any()) == training for n in range(12))
        assert not any(scaling[n].gradient.largest.any() for n in range(12))
