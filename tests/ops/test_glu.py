"""Gated linear units against the plain reference."""

from __future__ import annotations

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
KINDS = list(reference.GATES)


def draw(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """x [..., 2 * width], bias; and the gradient of y."""
    x = (2 * torch.randn(shape)).to(dtype)
    dout = torch.randn(*shape[:-1], shape[-1] // 2).to(dtype)
    return [x, torch.randn(shape[-1:])], dout


def compare(inputs: list[Tensor | None], dout: Tensor, dtype: torch.dtype, kind: str) -> None:
    reference.assert_as_good_as_pytorch(
        lambda: results_of(lambda x, b: ops.glu(x, kind, b), inputs, dout),
        lambda precision: results_of(
            lambda x, b: reference.glu(x, kind, b), inputs, dout, precision
        ),
        dtype,
        ["y", "dx", "dbias"] if inputs[1] is not None else ["y", "dx"],
    )


@pytest.mark.parametrize("width", [1, 15, 64, 65, 127, 1152])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_the_reference(dtype: torch.dtype, kind: str, width: int) -> None:
    torch.manual_seed(derived(width))
    inputs, dout = draw((70, 2 * width), dtype)
    compare(inputs, dout, dtype, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_without_bias_and_with_any_leading_shape(kind: str) -> None:
    torch.manual_seed(derived(0))
    (x, _), dout = draw((2, 3, 40, 66), torch.float32)
    compare([x, None], dout, torch.float32, kind)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bias_in_the_dtype_of_x(dtype: torch.dtype) -> None:
    torch.manual_seed(derived(1))
    (x, bias), dout = draw((40, 64), dtype)
    compare([x, bias.to(dtype)], dout, dtype, "silu")


def test_the_first_half_is_activated() -> None:
    y = ops.glu(torch.tensor([[-1.0, 2.0, 10.0, 100.0]]), "relu")
    assert y.tolist() == [[0.0, 200.0]]


@pytest.mark.parametrize("kind", KINDS)
def test_accuracy_over_the_whole_range(kind: str) -> None:
    a = torch.linspace(-14, 14, 40001)
    x = torch.stack([a, torch.ones_like(a)], -1).requires_grad_()
    y = ops.glu(x, kind)
    y.sum().backward()
    wide = a.double().requires_grad_()
    value = reference.GATES[kind](wide)
    value.sum().backward()
    for got, want in ((y.detach()[:, 0], value.detach()), (x.grad[:, 0], wide.grad)):
        assert ((got - want).abs() / (1 + want.abs())).max() < 1e-6
    assert torch.equal(x.grad[:, 1], y.detach()[:, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_special_values(kind: str) -> None:
    a = torch.tensor([float("nan"), float("inf"), 1e30, -1e30, 0.0, -100.0] * 20)
    y = ops.glu(torch.cat([a, torch.ones_like(a)]), kind)[:6]
    assert y[0].isnan()
    assert y[1] == float("inf")
    assert y[2] == a[2]
    assert y[3:].abs().max() < 1e-6


def test_strided_input_and_gradient() -> None:
    torch.manual_seed(derived(2))
    inputs, dout = draw((24, 40), torch.float32)
    x = torch.stack([inputs[0]] * 2, -1)[..., 0]
    gradient = torch.stack([dout] * 2, -1)[..., 0]
    assert not x.is_contiguous()
    f = lambda x, bias: ops.glu(x, "gelu", bias)  # noqa: E731
    for one, other in zip(
        results_of(f, inputs, dout), results_of(f, [x, inputs[1]], gradient), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("shape", [(0, 16), (3, 0), (2, 0, 4)])
def test_nothing_to_do(shape: tuple[int, ...]) -> None:
    inputs, dout = draw(shape, torch.float32)
    y, dx, dbias = results_of(lambda x, b: ops.glu(x, "silu", b), inputs, dout)
    assert y.shape == dout.shape
    assert dx.shape == shape
    assert torch.equal(dbias, torch.zeros(shape[-1]))


def test_same_bits_whatever_the_threads() -> None:
    torch.manual_seed(derived(3))
    inputs, dout = draw((500, 200), torch.float32)
    assert_same_bits_whatever_the_threads(
        lambda: results_of(lambda x, b: ops.glu(x, "gelu", b), inputs, dout)
    )


@pytest.mark.parametrize("kind", range(4))
@pytest.mark.parametrize("with_bias", [False, True])
def test_opcheck(kind: int, with_bias: bool) -> None:
    (x, bias), dout = draw((6, 20), torch.float32)
    bias = bias if with_bias else None
    opcheck(torch.ops.bert_unpad.glu_backward, (dout, x, bias, kind))
    bias = bias.requires_grad_() if with_bias else None
    opcheck(torch.ops.bert_unpad.glu, (x.requires_grad_(), bias, kind))


def test_compiles_without_graph_breaks() -> None:
    leaves = [t.requires_grad_() for t in draw((6, 20), torch.bfloat16)[0]]

    def f(x: Tensor, bias: Tensor) -> Tensor:
        return ops.glu(x * 2, "silu", bias).float().square().sum()

    assert_compiles_to_the_same_bits(f, leaves)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.randn(6, 20).double()}, "x must be float32, bfloat16 or float16"),
        ({"x": torch.randn(())}, r"x must have shape \[..., 2 \* width\], got \[\]"),
        ({"x": torch.randn(6, 21)}, r"x must have shape \[..., 2 \* width\], got \[6, 21\]"),
        ({"bias": torch.randn(10)}, r"bias must have shape \[20\], got \[10\]"),
        ({"bias": torch.randn(20).half()}, "bias must be float32 or of the input's dtype"),
    ],
)
def test_bad_input_is_named(change: dict, message: str) -> None:
    good = {"x": torch.randn(6, 20), "kind": "silu", "bias": torch.randn(20)}
    with pytest.raises(RuntimeError, match=message):
        ops.glu(**(good | change))


def test_kind_must_be_known() -> None:
    message = "glu: kind must be one of gelu, gelu_tanh, silu, relu, got 'swish'"
    with pytest.raises(ValueError, match=message):
        ops.glu(torch.randn(6, 20), "swish")
    with pytest.raises(RuntimeError, match="glu: kind must be between 0 and 3, got 4"):
        torch.ops.bert_unpad.glu(torch.randn(6, 20), None, 4)


def test_a_gradient_of_another_shape_is_named() -> None:
    with pytest.raises(
        RuntimeError, match=r"dy must have the shape of y, \[6, 10\], got \[6, 20\]"
    ):
        torch.ops.bert_unpad.glu_backward(torch.randn(6, 20), torch.randn(6, 20), None, 0)
