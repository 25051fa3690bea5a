"""Products of our own and by oneDNN, where MKL leaves AVX-512 unused, against fp64."""

import pytest
import torch
from torch import Tensor

from bert_unpad import ops
from bert_unpad.ops import matmul

packed_product_ = torch.ops.bert_unpad.packed_product_
ROWS = (0, 1, 2, 3, 4, 7, 16, 17, 36, 37, 60, 193, 400)  # by another piece of code up to 16 or 36


def bound(x: Tensor, weight: Tensor) -> Tensor:
    """Of rounding errors in sums of so many products, one by one."""
    depth = x.shape[1] + 2
    return depth * 2**-24 * (x.abs().double() @ weight.abs().double().T + 2)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("depth", "columns"), [(32, 32), (96, 160), (544, 64)])
@pytest.mark.parametrize("transposed", [False, True])
def test_products(rows: int, depth: int, columns: int, transposed: bool) -> None:
    x, bias, addend = torch.randn(rows, depth), torch.randn(columns), torch.randn(rows, columns)
    weight = torch.randn(depth, columns).T if transposed else torch.randn(columns, depth)
    want = x.double() @ weight.double().T
    for b, a in ((None, None), (bias, None), (None, addend), (bias, addend)):
        y = torch.full((rows, columns), torch.nan)
        packed_product_(y, x, weight, b, a)
        whole = want + sum(t.double() for t in (b, a) if t is not None)
        assert ((y - whole).abs() <= bound(x, weight) + 2**-23 * whole.abs()).all()


def test_the_addend_is_not_overwritten() -> None:
    x, weight, y = torch.randn(40, 32), torch.randn(32, 32), torch.randn(40, 32)
    with pytest.raises(RuntimeError, match="y must not lie in the memory of addend"):
        packed_product_(y, x, weight, None, y)


def test_rows_may_lie_apart() -> None:
    for rows in (5, 50):
        x, weight = torch.randn(rows, 3, 64)[:, 1], torch.randn(96, 2, 64)[:, 1]
        y, addend = torch.zeros(rows, 3, 96), torch.randn(rows, 96)
        packed_product_(y[:, 1], x, weight, None, addend)
        want = x.double() @ weight.double().T + addend
        assert ((y[:, 1] - want).abs() <= bound(x, weight) + 2**-23 * want.abs()).all()
        assert not y[:, 0].any()
        assert not y[:, 2].any()


def test_neither_threads_nor_other_rows_change_a_row() -> None:
    x, weight, bias = torch.randn(300, 128), torch.randn(4096 * 2 + 96, 128), torch.randn(8288)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(torch.empty(300, 8288))
            packed_product_(found[-1], x, weight, bias, None)
    finally:
        torch.set_num_threads(before)
    few = torch.empty(100, 8288)
    packed_product_(few, x[100:200], weight, bias, None)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert torch.equal(few, found[0][100:200])


def test_what_does_not_fit_is_named() -> None:
    y, x, weight = torch.zeros(5, 64), torch.zeros(5, 32), torch.zeros(64, 32)
    for change, message in (
        ((y, x.double(), weight, None, None), "x must be float32"),
        ((y, x, weight.bfloat16(), None, None), "weight must be float32"),
        ((y[:4], x, weight, None, None), "y must have shape"),
        ((y, x, weight[:, :16], None, None), "weight must have shape"),
        ((y, x, weight, torch.zeros(63), None), "bias must have shape"),
        ((y, x, weight, torch.zeros(64).half(), None), "bias must be float32"),
        ((y, x, weight, None, y.T), "addend must have shape"),
        ((y, torch.zeros(32, 5).T, weight, None, None), "x must have contiguous rows"),
        ((y[:, :33], x, torch.zeros(33, 32), None, None), "multiples of 32, got 32 and 33"),
        ((y, x, torch.zeros(64, 64)[:, ::2], None, None), "weight must have contiguous"),
    ):
        with pytest.raises(RuntimeError, match=message):
            packed_product_(*change)


class TestInLayers:
    """With the products that a CPU takes whose AVX-512 MKL leaves unused."""

    @pytest.fixture(autouse=True)
    def _wanted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(matmul, "_AVX512_UNUSED", True)

    @pytest.mark.parametrize(("tokens", "out", "width"), [(0, 8, 4), (1, 2, 7), (61, 96, 128)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_products(self, dtype: torch.dtype, tokens: int, out: int, width: int) -> None:
        if dtype == torch.bfloat16 and not matmul.CPU_MULTIPLIES_BF16:
            pytest.skip("needs a CPU that multiplies bf16")
        x, weight = torch.randn(tokens, width).to(dtype), torch.randn(out, width).to(dtype)
        bias, dy = torch.randn(out).to(dtype), torch.randn(tokens, out).to(dtype)
        assert matmul.by_us(x, weight) == (dtype == torch.bfloat16 or out == 96)
        for got, want in (
            (matmul.forward(x, weight), x.double() @ weight.double().T),
            (matmul.forward(x, weight, bias), x.double() @ weight.double().T + bias.double()),
            (matmul.dgrad(dy, weight), dy.double() @ weight.double()),
            (matmul.dgrad(dy, weight, x), dy.double() @ weight.double() + x.double()),
        ):
            assert got.dtype == dtype
            assert got.shape == want.shape
            rounded = 2**-8 if dtype == torch.bfloat16 else 3e-6
            torch.testing.assert_close(got.double(), want, rtol=rounded, atol=10 * rounded)

    def test_other_tensors_take_pytorchs(self) -> None:
        x, weight = torch.randn(3, 32), torch.randn(64, 32)
        assert matmul.by_us(x, weight)
        assert not matmul.by_us(x, weight.bfloat16())
        assert not matmul.by_us(x.half(), weight.half())
        with torch.backends.mkldnn.flags(enabled=False):
            assert not matmul.by_us(x.bfloat16(), weight.bfloat16())
        assert torch.equal(torch.jit.trace(ops.linear, (x, weight))(x, weight), x @ weight.T)

    def test_gradients(self) -> None:
        x, weight, bias = torch.randn(20, 64), torch.randn(96, 64), torch.randn(96)
        dy = torch.randn(20, 96)
        found = [t.clone().requires_grad_() for t in (x, weight, bias)]
        wanted = [t.double().requires_grad_() for t in (x, weight, bias)]
        ops.linear(*found).backward(dy)
        torch.nn.functional.linear(*wanted).backward(dy.double())
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got.grad.double(), want.grad, rtol=3e-6, atol=3e-5)
