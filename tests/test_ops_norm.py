"""dropout_add_layer_norm against the plain reference."""

from __future__ import annotations

import pytest
import reference
import torch
from torch import Tensor
from torch.library import opcheck

from bert_unpad import ops

RNG = torch.tensor([987654321, 7])
NAMES = ["y", "dx", "dresidual", "dx_bias", "dweight", "dbias"]


def compare(
    rows: int,
    hidden: int,
    dtype: torch.dtype,
    p: float,
    parameters: torch.dtype,
    residual: bool = True,
    x_bias: bool = True,
) -> None:
    x, r, dy = (torch.randn(rows, hidden).to(dtype) for _ in range(3))
    b, w, c = (torch.randn(hidden).to(parameters) for _ in range(3))

    def run(operator, precision: torch.dtype | None) -> list[Tensor]:
        leaves = [t.to(precision or t.dtype, copy=True).requires_grad_() for t in (x, r, b, w, c)]
        lx, lr, lb, lw, lc = leaves
        y = operator(
            lx, lr if residual else None, lw, lc, p=p, x_bias=lb if x_bias else None, rng=RNG
        )
        y.backward(dy.to(y.dtype))
        used = [True, residual, x_bias, True, True]
        return [y.detach(), *(t.grad for t, u in zip(leaves, used, strict=True) if u)]

    names = [n for n, u in zip(NAMES, [1, 1, residual, x_bias, 1, 1], strict=True) if u]
    reference.assert_as_good_as_pytorch(
        lambda: run(ops.dropout_add_layer_norm, None),
        lambda precision: run(reference.dropout_add_layer_norm, precision),
        dtype,
        names,
    )


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", [128, 768, 1000])
def test_matches_the_reference(hidden: int, dtype: torch.dtype, p: float) -> None:
    torch.manual_seed(hidden)
    compare(150, hidden, dtype, p, dtype)


@pytest.mark.parametrize("hidden", [3, 7, 17, 33])
def test_odd_sizes(hidden: int) -> None:
    torch.manual_seed(hidden)
    compare(5, hidden, torch.float32, 0.1, torch.float32)


def test_fp32_parameters_with_bf16_activations() -> None:
    torch.manual_seed(1)
    compare(64, 256, torch.bfloat16, 0.1, torch.float32)


@pytest.mark.parametrize(("residual", "x_bias"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_optional_operands(residual: bool, x_bias: bool, p: float) -> None:
    torch.manual_seed(2)
    compare(20, 64, torch.float32, p, torch.float32, residual, x_bias)


def test_no_rows_give_zero_gradients() -> None:
    x = torch.randn(0, 16, requires_grad=True)
    w, c = torch.ones(16, requires_grad=True), torch.zeros(16, requires_grad=True)
    ops.dropout_add_layer_norm(x, None, w, c).sum().backward()
    assert x.grad.shape == (0, 16)
    assert torch.equal(w.grad, torch.zeros(16))
    assert torch.equal(c.grad, torch.zeros(16))


def test_same_bits_whatever_the_threads() -> None:
    torch.manual_seed(3)
    x, r = torch.randn(501, 96), torch.randn(501, 96)
    w, c = torch.randn(96), torch.randn(96)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            leaves = [t.clone().requires_grad_() for t in (x, r, w, c)]
            y = ops.dropout_add_layer_norm(*leaves, p=0.1, rng=RNG)
            y.square().sum().backward()
            results.append([y.detach(), *(t.grad for t in leaves)])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_input_that_is_not_contiguous() -> None:
    x = torch.randn(24, 10).t()
    w, c = torch.randn(24), torch.randn(24)
    expected = ops.dropout_add_layer_norm(x.contiguous(), None, w, c)
    assert torch.equal(ops.dropout_add_layer_norm(x, None, w, c), expected)


def test_nan_stays_in_its_row() -> None:
    x = torch.randn(6, 40)
    x[2, 5] = float("nan")
    y = ops.dropout_add_layer_norm(x, None, torch.ones(40), torch.zeros(40))
    assert torch.equal(y.isnan().all(1), torch.arange(6) == 2)
    assert not y[3:].isnan().any()


@pytest.mark.parametrize("p", [0.0, 0.2])
def test_opcheck(p: float) -> None:
    x, r = (torch.randn(6, 24, requires_grad=True) for _ in range(2))
    b, w, c = (torch.randn(24, requires_grad=True) for _ in range(3))
    args = (x, b, r, w, c, p, 1e-12, RNG if p else None)
    opcheck(torch.ops.bert_unpad.dropout_add_layer_norm, args)


def test_compiles_without_graph_breaks() -> None:
    x, w, c = torch.randn(6, 24, requires_grad=True), torch.randn(24), torch.randn(24)

    def f(x: Tensor) -> Tensor:
        return ops.dropout_add_layer_norm(x, x * 2, w, c, p=0.1, rng=RNG).square().sum()

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    (a,), (b,) = (torch.autograd.grad(g(x), x) for g in (f, compiled))
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.randn(4, 8).double()}, "x must be float32, bfloat16 or float16"),
        ({"residual": torch.randn(4, 9)}, "residual must have the shape of x"),
        ({"residual": torch.randn(4, 8).half()}, "residual must have the dtype of x"),
        ({"weight": torch.randn(9)}, r"weight must have shape \[8\]"),
        ({"bias": torch.randn(8).half()}, "bias must"),
        ({"x_bias": torch.randn(1)}, r"x_bias must have shape \[8\]"),
        ({"p": 1.0}, r"p must be in \[0, 1\)"),
        ({"p": 0.5, "rng": torch.zeros(1, dtype=torch.int64)}, "rng must have shape"),
    ],
)
def test_bad_input_is_named(change: dict, message: str) -> None:
    good = {
        "x": torch.randn(4, 8),
        "residual": torch.randn(4, 8),
        "weight": torch.randn(8),
        "bias": torch.randn(8),
    }
    with pytest.raises(ValueError, match=message):
        ops.dropout_add_layer_norm(**(good | change))
