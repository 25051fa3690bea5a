"""Bias + GELU against the plain reference."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from bert_unpad import ops
from tests.support import reference
from tests.support.op_checks import (
    assert_compiles_to_the_same_bits,
    assert_same_bits_whatever_the_threads,
    results_of,
)
from tests.support.seeds import derived

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMS = ["none", "tanh"]


def draw(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """x, bias; and the gradient of y."""
    x = (2 * torch.randn(shape)).to(dtype)
    return [x, torch.randn(shape[-1:])], torch.randn(shape).to(dtype)


def compare(
    inputs: list[Tensor | None], dout: Tensor, dtype: torch.dtype, approximate: str
) -> None:
    reference.assert_as_good_as_pytorch(
        lambda: results_of(lambda x, b: ops.bias_gelu(x, b, approximate=approximate), inputs, dout),
        lambda precision: results_of(
            lambda x, b: reference.bias_gelu(x, b, approximate), inputs, dout, precision
        ),
        dtype,
        ["y", "dx", "dbias"] if inputs[1] is not None else ["y", "dx"],
    )


@pytest.mark.parametrize("hidden", [1, 15, 64, 65, 127, 3072])
@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_the_reference(dtype: torch.dtype, approximate: str, hidden: int) -> None:
    torch.manual_seed(derived(hidden))
    inputs, dout = draw((70, hidden), dtype)
    compare(inputs, dout, dtype, approximate)


@pytest.mark.parametrize("approximate", FORMS)
def test_without_bias_and_with_any_leading_shape(approximate: str) -> None:
    torch.manual_seed(derived(0))
    (x, _), dout = draw((2, 3, 40, 33), torch.float32)
    compare([x, None], dout, torch.float32, approximate)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bias_in_the_dtype_of_x(dtype: torch.dtype) -> None:
    torch.manual_seed(derived(1))
    (x, bias), dout = draw((40, 64), dtype)
    compare([x, bias.to(dtype)], dout, dtype, "none")


def exact(x: Tensor) -> tuple[Tensor, Tensor]:
    """x Phi(x) and its derivative in float64, without the cancellation of 1 + erf."""
    x = x.double()
    cdf = 0.5 * torch.erfc(-x / math.sqrt(2))
    return x * cdf, cdf + x * torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def tanh_form(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.double()
    k = math.sqrt(2 / math.pi)
    s = torch.sigmoid(2 * k * (x + 0.044715 * x**3))
    return x * s, s + x * s * (1 - s) * 2 * k * (1 + 3 * 0.044715 * x * x)


@pytest.mark.parametrize(("approximate", "truth"), [("none", exact), ("tanh", tanh_form)])
def test_accuracy_over_the_whole_range(approximate: str, truth) -> None:
    x = torch.linspace(-14, 14, 40001, requires_grad=True)
    y = ops.bias_gelu(x, approximate=approximate)
    y.sum().backward()
    value, slope = truth(x.detach())
    assert (y.detach() - value).abs().max() < 1e-6
    assert (x.grad - slope).abs().max() < 2e-6
    # The left tail keeps its relative accuracy, which plain PyTorch's does not.
    tail = (x > -8) & (x < -1)
    assert ((y.detach() - value) / value)[tail].abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_results_are_rounded_once(dtype: torch.dtype) -> None:
    """To half a unit in the last place, and a tenth of that for the shorter formula."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = numbers[numbers.isfinite() & (numbers.abs() < 12)].requires_grad_()
    y = ops.bias_gelu(x)
    y.sum().backward()
    value, slope = exact(x.detach())
    unit = torch.finfo(dtype).eps / 2
    normal = value.abs() > torch.finfo(dtype).tiny
    assert (((y.detach() - value) / value).abs()[normal] <= 1.1 * unit).all()
    # The derivative has a zero, at -0.75.
    assert ((x.grad - slope).abs() <= 1.1 * unit * slope.abs() + 2e-5).all()


@pytest.mark.parametrize("approximate", FORMS)
def test_special_values(approximate: str) -> None:
    x = torch.tensor([float("nan"), float("inf"), 1e30, -1e30, 0.0, -100.0] * 20)
    y = ops.bias_gelu(x, approximate=approximate)[:6]
    assert y[0].isnan()
    assert y[1] == float("inf")
    assert y[2] == x[2]
    assert y[3:].abs().max() < 1e-6


def test_strided_input_and_gradient() -> None:
    torch.manual_seed(derived(2))
    inputs, dout = draw((24, 40), torch.float32)
    x = torch.stack([inputs[0]] * 2, -1)[..., 0]
    gradient = torch.stack([dout] * 2, -1)[..., 0]
    assert not x.is_contiguous()
    a = results_of(ops.bias_gelu, inputs, dout)
    b = results_of(ops.bias_gelu, [x, inputs[1]], gradient)
    for one, other in zip(a, b, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("shape", [(0, 16), (3, 0)])
def test_nothing_to_do(shape: tuple[int, int]) -> None:
    inputs, dout = draw(shape, torch.float32)
    y, dx, dbias = results_of(ops.bias_gelu, inputs, dout)
    assert y.shape == dx.shape == shape
    assert torch.equal(dbias, torch.zeros(shape[1]))


def test_same_bits_whatever_the_threads() -> None:
    torch.manual_seed(derived(3))
    inputs, dout = draw((500, 200), torch.float32)
    assert_same_bits_whatever_the_threads(lambda: results_of(ops.bias_gelu, inputs, dout))


@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_opcheck(tanh: bool, with_bias: bool) -> None:
    (x, bias), _ = draw((6, 20), torch.float32)
    bias = bias.requires_grad_() if with_bias else None
    opcheck(torch.ops.bert_unpad.bias_gelu, (x.requires_grad_(), bias, tanh))


def test_compiles_without_graph_breaks() -> None:
    leaves = [t.requires_grad_() for t in draw((6, 20), torch.bfloat16)[0]]

    def f(x: Tensor, bias: Tensor) -> Tensor:
        return ops.bias_gelu(x * 2, bias).float().square().sum()

    assert_compiles_to_the_same_bits(f, leaves)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.randn(6, 20).double()}, "x must be float32, bfloat16 or float16"),
        ({"x": torch.randn(())}, r"x must have shape \[..., hidden\]"),
        ({"bias": torch.randn(19)}, r"bias must have shape \[20\], got \[19\]"),
        ({"bias": torch.randn(20).half()}, "bias must be float32 or of the input's dtype"),
    ],
)
def test_bad_input_is_named(change: dict, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        ops.bias_gelu(**({"x": torch.randn(6, 20), "bias": torch.randn(20)} | change))


def test_form_must_be_known() -> None:
    with pytest.raises(ValueError, match='approximate must be "none" or "tanh", got \'erf\''):
        ops.bias_gelu(torch.randn(6, 20), approximate="erf")
