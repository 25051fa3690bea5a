"""bias_gelu against the plain reference."""

from __future__ import annotations

import pytest
import reference
import torch
from torch import Tensor
from torch.library import opcheck

from bert_unpad import ops

FORMS = ["none", "tanh"]


def compare(x: Tensor, bias: Tensor | None, approximate: str) -> None:
    dy = torch.randn(x.shape).to(x.dtype)

    def run(operator, precision: torch.dtype | None) -> list[Tensor]:
        leaves = [
            t.to(precision or t.dtype, copy=True).requires_grad_()
            for t in (x, bias)
            if t is not None
        ]
        y = operator(leaves[0], leaves[1] if bias is not None else None, approximate=approximate)
        y.backward(dy.to(y.dtype))
        return [y.detach(), *(t.grad for t in leaves)]

    reference.assert_as_good_as_pytorch(
        lambda: run(ops.bias_gelu, None),
        lambda precision: run(reference.bias_gelu, precision),
        x.dtype,
        ["y", "dx", "dbias"][: 3 if bias is not None else 2],
    )


@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", [128, 1000])
def test_matches_the_reference(hidden: int, dtype: torch.dtype, approximate: str) -> None:
    torch.manual_seed(hidden)
    x = (torch.randn(150, hidden) * 2).to(dtype)
    compare(x, torch.randn(hidden).to(dtype), approximate)


@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("hidden", [1, 7, 17, 33])
def test_odd_sizes(hidden: int, approximate: str) -> None:
    torch.manual_seed(hidden)
    compare(torch.randn(3, hidden), torch.randn(hidden), approximate)
    compare(torch.randn(2, 2, hidden), None, approximate)


def test_fp32_bias_with_bf16_activations() -> None:
    torch.manual_seed(1)
    compare(torch.randn(64, 96).bfloat16(), torch.randn(96), "none")


@pytest.mark.parametrize("approximate", FORMS)
def test_accuracy_over_the_whole_range(approximate: str) -> None:
    # Relative to |x|, so that the cancellation in 1 + erf or 1 + tanh would show on the left.
    x = torch.linspace(-12, 12, 200_001)
    y = ops.bias_gelu(x[None], approximate=approximate)[0].double()
    exact = reference.bias_gelu(x.double(), None, approximate)
    assert ((y - exact).abs() <= 3e-7 * x.abs() + 1e-30).all()
    tail = (x > -5) & (x < 0)
    assert ((y - exact).abs() <= 2e-5 * exact.abs())[tail].all()


@pytest.mark.parametrize("approximate", FORMS)
def test_infinities_and_nan(approximate: str) -> None:
    x = torch.tensor([[float("inf"), float("nan"), 1e6, -1e6, 0.0]], requires_grad=True)
    y = ops.bias_gelu(x, approximate=approximate)
    y.backward(torch.ones_like(y))
    y = y.detach()
    assert y[0, 0] == float("inf")
    assert y[0, 1].isnan()
    assert x.grad[0, 1].isnan()
    assert y[0, 2] == pytest.approx(1e6)
    assert y[0, 3:].tolist() == pytest.approx([0.0, 0.0], abs=1e-7)
    assert x.grad[0, 2:].tolist() == pytest.approx([1.0, 0.0, 0.5])


def test_no_rows_give_zero_gradients() -> None:
    x, b = torch.randn(0, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    ops.bias_gelu(x, b).sum().backward()
    assert x.grad.shape == (0, 16)
    assert torch.equal(b.grad, torch.zeros(16))


def test_same_bits_whatever_the_threads() -> None:
    torch.manual_seed(2)
    x, b = torch.randn(333, 80), torch.randn(80)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            leaves = [t.clone().requires_grad_() for t in (x, b)]
            y = ops.bias_gelu(*leaves)
            y.square().sum().backward()
            results.append([y.detach(), *(t.grad for t in leaves)])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("tanh", [False, True])
def test_opcheck(tanh: bool) -> None:
    x, b = torch.randn(6, 24, requires_grad=True), torch.randn(24, requires_grad=True)
    opcheck(torch.ops.bert_unpad.bias_gelu, (x, b, tanh))
    opcheck(torch.ops.bert_unpad.bias_gelu, (x, None, tanh))


def test_compiles_without_graph_breaks() -> None:
    x, b = torch.randn(6, 24, requires_grad=True), torch.randn(24)

    def f(x: Tensor) -> Tensor:
        return ops.bias_gelu(x * 2, b).square().sum()

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    (a,), (c,) = (torch.autograd.grad(g(x), x) for g in (f, compiled))
    torch.testing.assert_close(a, c)


def test_bad_input_is_named() -> None:
    x, b = torch.randn(4, 8), torch.randn(8)
    with pytest.raises(ValueError, match='approximate must be "none" or "tanh"'):
        ops.bias_gelu(x, b, approximate="erf")
    with pytest.raises(ValueError, match=r"bias must have shape \[8\]"):
        ops.bias_gelu(x, b[:7])
    with pytest.raises(ValueError, match="x must be float32, bfloat16 or float16"):
        ops.bias_gelu(x.double(), b)
    with pytest.raises(ValueError, match="bias must be"):
        ops.bias_gelu(x, b.half())
