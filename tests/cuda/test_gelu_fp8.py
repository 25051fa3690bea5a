"""GELU that writes 8 bits on a GPU: near what a CPU computes, and the same bits every time."""

from __future__ import annotations

import pytest
import torch

from bert_unpad import ops
from bert_unpad.ops.delayed_scaling import DelayedScale, LinearScales
from bert_unpad.ops.fp8 import quantize_by, quantize_gradient
from bert_unpad.ops.gelu_fp8 import bias_gelu_fp8, bias_gelu_fp8_backward
from tests.cuda.test_fp8 import draw, pytestmark  # noqa: F401
from tests.support.cuda_checks import (
    DTYPES,
    assert_graph_takes_new_values,
    assert_runs_on_the_current_stream,
    assert_same_bits,
)


def scale(value: float, device: str = "cuda") -> DelayedScale:
    return DelayedScale(torch.tensor(value, device=device), torch.zeros(1024, device=device))


def both() -> tuple[LinearScales, LinearScales]:
    return LinearScales(scale(0.02), scale(1e-3)), LinearScales(scale(0.01), scale(2e-3))


@pytest.mark.sanitizer
@pytest.mark.parametrize("e5m2", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 16), (1, 16), (66, 80), (3000, 1040)])
def test_rounding_is_that_of_the_cpu(shape, dtype, e5m2):
    (x,) = draw(shape, dtype=dtype)
    results = []
    for device in ("cuda", "cpu"):
        given = scale(0.01, device)
        q, kept, _ = quantize_by(x.to(device), e5m2, True, given)
        results.append([q.cpu(), kept.cpu(), given.largest.max().cpu()])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 16), (1, 16), (66, 80), (3000, 1040)])
def test_a_gradient_and_the_sum_of_its_rows(shape, dtype):
    (dy,) = draw(shape, dtype=dtype)
    q, kept, _ = quantize_by(dy, True, True, scale(1e-4))
    *same, _, sums = quantize_gradient(dy, True, scale(1e-4), True)
    assert_same_bits([t.view(torch.uint8) for t in same], [t.view(torch.uint8) for t in (q, kept)])
    wide = dy.double()
    bound = wide.abs().sum(0) * max(1, shape[0]) * torch.finfo(torch.float32).eps
    assert ((sums.double() - wide.sum(0)).abs() <= bound).all()
    assert_same_bits([quantize_gradient(dy, True, scale(1e-4), True)[3]], [sums])


@pytest.mark.sanitizer
@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 16), (1, 16), (66, 80), (3000, 1040)])
def test_near_the_cpu(shape, dtype, tanh):
    x, dy = draw(shape, shape, dtype=dtype)
    (bias,) = draw(shape[1:], dtype=torch.float32)
    results = []
    for device in ("cuda", "cpu"):
        inner, gradient = scale(0.01, device), scale(1e-4, device)
        here = [t.to(device) for t in (dy, x, bias)]
        q, kept = bias_gelu_fp8(*here[1:], tanh, inner)
        g, g_kept, dbias = bias_gelu_fp8_backward(*here, tanh, gradient)
        largest = [inner.largest.max(), gradient.largest.max()]
        results.append([t.cpu() for t in (q, kept, g, g_kept, dbias, *largest)])
    for a, b in zip(*results, strict=True):
        if a.dtype == torch.float32:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)
        else:
            eps = torch.finfo(a.dtype).eps
            torch.testing.assert_close(a.float(), b.float(), rtol=eps, atol=eps)


def test_streams_graphs_and_repetition():
    x, dy = draw((200, 256), (200, 256), dtype=torch.bfloat16)
    weights = draw((512, 256), (512,), (256, 512), dtype=torch.float32, seed=1)

    def gradients(x):
        leaves = [t.detach().clone().requires_grad_() for t in (x, *weights)]
        scales = both()
        y, _ = ops.mlp(*leaves, fp8=True, scales=scales)
        y.backward(dy)
        noted = (each.largest for layer in scales for each in layer)
        return [y.detach(), *(t.grad for t in leaves), *noted]

    assert_same_bits(gradients(x), gradients(x))
    assert_runs_on_the_current_stream(gradients, x)
    scales = both()
    with torch.no_grad():
        assert_graph_takes_new_values(
            lambda: [ops.mlp(x, *weights, fp8=True, scales=scales)[0]],
            lambda: x.add_(torch.randn_like(x)),
        )
