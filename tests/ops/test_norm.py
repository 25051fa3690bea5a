"""Dropout + residual + LayerNorm against the plain reference."""

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

RNG = torch.tensor([987654321, 7])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAMES = ["y", "dx", "dresidual", "dweight", "dbias", "dx_bias"]


def draw(
    shape: tuple[int, ...], dtype: torch.dtype, param_dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], Tensor]:
    """x, residual, weight, bias, x_bias; and the gradient of y."""
    hidden = shape[-1:]
    params = [1 + 0.3 * torch.randn(hidden), torch.randn(hidden), torch.randn(hidden)]
    inputs = [torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)]
    return inputs + [t.to(param_dtype) for t in params], torch.randn(shape).to(dtype)


def compare(
    inputs: list[Tensor | None], dout: Tensor, dtype: torch.dtype, p: float, eps: float = 1e-12
) -> None:
    def of(module):
        def run(x, residual, weight, bias, x_bias):
            return module.dropout_add_layer_norm(
                x, residual, weight, bias, dropout_p=p, eps=eps, x_bias=x_bias, rng=RNG
            )

        return run

    names = NAMES[:1] + [n for n, x in zip(NAMES[1:], inputs, strict=True) if x is not None]
    reference.assert_as_good_as_pytorch(
        lambda: results_of(of(ops), inputs, dout),
        lambda precision: results_of(of(reference), inputs, dout, precision),
        dtype,
        names,
    )


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("hidden", [3, 16, 100, 768])
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_the_reference(dtype: torch.dtype, hidden: int, p: float) -> None:
    torch.manual_seed(derived(hidden))
    inputs, dout = draw((70, hidden), dtype)
    compare(inputs, dout, dtype, p)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("missing", [(1,), (4,), (1, 4)], ids=["residual", "x_bias", "both"])
def test_optional_inputs(missing: tuple[int, ...], p: float) -> None:
    torch.manual_seed(derived(0))
    inputs, dout = draw((40, 33), torch.float32)
    compare([None if i in missing else x for i, x in enumerate(inputs)], dout, torch.float32, p)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_in_the_dtype_of_x(dtype: torch.dtype) -> None:
    torch.manual_seed(derived(1))
    inputs, dout = draw((40, 64), dtype, dtype)
    compare(inputs, dout, dtype, 0.1)


def test_any_leading_shape_and_many_rows() -> None:
    torch.manual_seed(derived(2))
    inputs, dout = draw((3, 5, 600, 20), torch.float32)
    compare(inputs, dout, torch.float32, 0.1)


def test_large_offset_does_not_cancel() -> None:
    torch.manual_seed(derived(3))
    inputs, dout = draw((30, 128), torch.float32)
    inputs[0] += 1000.0
    # Rounding x + residual to fp32 alone costs 1e-4 here; a one-pass variance would cost 1e-1.
    ours = results_of(lambda *t: ops.dropout_add_layer_norm(*t), inputs[:4], dout)
    truth = results_of(
        lambda *t: reference.dropout_add_layer_norm(*t), inputs[:4], dout, torch.float64
    )
    for a, b in zip(ours, truth, strict=True):
        assert (a - b).abs().max() < 5e-4 * b.abs().max()


def test_eps_counts() -> None:
    torch.manual_seed(derived(4))
    inputs, dout = draw((10, 50), torch.float32)
    compare([x * 1e-3 for x in inputs], dout, torch.float32, 0.0, eps=1e-5)


def test_strided_inputs() -> None:
    torch.manual_seed(derived(5))
    (x, residual, weight, bias, _), _ = draw((24, 40), torch.float32)
    strided = [torch.stack([t, t], -1)[..., 0] for t in (x, residual)]
    assert not strided[0].is_contiguous()
    y = ops.dropout_add_layer_norm(*strided, weight, bias)
    assert torch.equal(y, ops.dropout_add_layer_norm(x, residual, weight, bias))


def test_gradient_of_any_stride() -> None:
    torch.manual_seed(derived(6))
    inputs, dout = draw((24, 40), torch.float32)
    strided = torch.stack([dout, dout], -1)[..., 0]
    run = lambda *t: ops.dropout_add_layer_norm(*t)  # noqa: E731
    for a, b in zip(
        results_of(run, inputs[:4], dout), results_of(run, inputs[:4], strided), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 5)])
def test_no_rows(shape: tuple[int, ...]) -> None:
    inputs, dout = draw(shape, torch.float32)
    y, *gradients = results_of(
        lambda x, r, w, b, xb: ops.dropout_add_layer_norm(x, r, w, b, x_bias=xb, dropout_p=0.1),
        inputs,
        dout,
    )
    assert y.shape == shape
    for x, gradient in zip(inputs, gradients, strict=True):
        assert torch.equal(gradient, torch.zeros_like(x))


def test_dropout_keeps_the_exact_rate_and_scale() -> None:
    # The gradient of x where that of the LayerNorm's input is known to be nonzero.
    torch.manual_seed(derived(7))
    rows, hidden, p = 300, 512, 0.1
    inputs, dout = draw((rows, hidden), torch.float32)
    _, dx, dresidual, *_ = results_of(
        lambda x, r, w, b: ops.dropout_add_layer_norm(x, r, w, b, dropout_p=p, rng=RNG),
        inputs[:4],
        dout,
    )
    mask = reference.row_mask(RNG, p, rows, hidden)
    assert torch.equal(dx != 0, mask)
    torch.testing.assert_close(
        dx, dresidual * mask * reference.dropout_scale(p), rtol=1e-6, atol=1e-9
    )
    rate = mask.double().mean().item()
    assert rate == pytest.approx(1 - p, abs=5 * (p * (1 - p) / mask.numel()) ** 0.5)


def test_nan_stays_in_its_row() -> None:
    inputs, _ = draw((6, 40), torch.float32)
    inputs[0][2, 39] = float("nan")
    y = ops.dropout_add_layer_norm(*inputs[:4])
    assert y[2].isnan().all()
    assert y[[0, 1, 3, 4, 5]].isfinite().all()


def test_same_bits_whatever_the_threads() -> None:
    torch.manual_seed(derived(8))
    inputs, dout = draw((500, 96), torch.float32)
    assert_same_bits_whatever_the_threads(
        lambda: results_of(
            lambda x, r, w, b, xb: ops.dropout_add_layer_norm(
                x, r, w, b, x_bias=xb, dropout_p=0.1, rng=RNG
            ),
            inputs,
            dout,
        )
    )


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("optional", [True, False])
def test_opcheck(p: float, optional: bool) -> None:
    x, residual, weight, bias, x_bias = (
        t.requires_grad_() for t in draw((6, 20), torch.float32)[0]
    )
    if not optional:
        residual = x_bias = None
    args = (x, x_bias, residual, weight, bias, p, 1e-12, RNG if p else None)
    opcheck(torch.ops.bert_unpad.dropout_add_layer_norm, args)


def test_compiles_without_graph_breaks() -> None:
    inputs, _ = draw((6, 20), torch.bfloat16)
    leaves = [t.requires_grad_() for t in inputs]

    def f(x, residual, weight, bias, x_bias):
        y = ops.dropout_add_layer_norm(
            x * 2, residual, weight, bias, x_bias=x_bias, dropout_p=0.1, rng=RNG
        )
        return y.float().square().sum()

    assert_compiles_to_the_same_bits(f, leaves)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.randn(6, 20).double()}, "x must be float32, bfloat16 or float16"),
        ({"x": torch.randn(())}, r"x must have shape \[..., hidden\]"),
        ({"x": torch.randn(6, 0)}, r"hidden >= 1, got \[6, 0\]"),
        ({"residual": torch.randn(6, 19)}, r"residual must have the shape of x, \[6, 20\]"),
        ({"residual": torch.randn(6, 20).half()}, "residual must have the dtype of x"),
        ({"weight": torch.randn(19)}, r"weight must have shape \[20\], got \[19\]"),
        ({"weight": torch.randn(20).half()}, "weight must be float32 or of the input's dtype"),
        ({"bias": torch.randn(20, 1)}, r"bias must have shape \[20\]"),
        ({"x_bias": torch.randn(21)}, r"x_bias must have shape \[20\]"),
        ({"dropout_p": 1.0}, r"dropout_p must be in \[0, 1\), got 1"),
        ({"dropout_p": 0.1, "rng": torch.zeros(2)}, "rng must be int64"),
        (
            {"dropout_p": 0.1, "rng": torch.zeros(3, dtype=torch.int64)},
            r"rng must have shape \[2\]",
        ),
    ],
)
def test_bad_input_is_named(change: dict, message: str) -> None:
    good = {
        "x": torch.randn(6, 20),
        "residual": torch.randn(6, 20),
        "weight": torch.randn(20),
        "bias": torch.randn(20),
    }
    with pytest.raises(RuntimeError, match=message):
        ops.dropout_add_layer_norm(**(good | change))


def test_weight_and_bias_of_different_dtypes_are_refused() -> None:
    x, weight = torch.randn(6, 20).half(), torch.randn(20)
    with pytest.raises(RuntimeError, match="bias must have the dtype of weight"):
        ops.dropout_add_layer_norm(x, None, weight, weight.half())
