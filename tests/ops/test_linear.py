"""Linear layers and their products, against plain formulas.

The products that only a GPU takes (with epilogues) run on a CPU too: there the operators behind
them are PyTorch's, so what autograd makes of them can be compared.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.library import opcheck
from torch.nn.parallel import DistributedDataParallel

from bert_unpad import ops
from bert_unpad.ops import matmul
from tests.support import processes as mp
from tests.support.backends import GPU, Backend
from tests.support.linear_cases import draw, gradients, leaves, plain_linear
from tests.support.reference import assert_as_good_as_pytorch
from tests.support.seeds import derived

CUDA = pytest.mark.backends("cuda")
LOW = (torch.bfloat16, torch.float16)
# fp32 products are PyTorch's on a GPU.
DTYPES = [pytest.param(torch.float32, marks=pytest.mark.backends("cpu")), *LOW]
SIZES = (48, 96)


@pytest.mark.sanitizer
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("low_weights", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows", [(0,), (1,), (37,), (3, 5), (129,), pytest.param((300,), marks=CUDA)]
)
def test_linear(
    backend: Backend, fused: bool, rows: tuple[int, ...], dtype: torch.dtype, low_weights: bool,
    bias: bool,
) -> None:  # fmt: skip
    x, weight, b, dy, residual = draw(
        (*rows, SIZES[0]), (SIZES[1], SIZES[0]), (SIZES[1],), (*rows, SIZES[1]), (*rows, SIZES[0])
    )
    low = dtype if low_weights else torch.float32
    given = backend.put([x.to(dtype), weight.to(low), b.to(low) if bias else None])
    dy, residual = backend.put((dy, residual))
    assert matmul.fused(*given[:2]) == fused
    names = ["y", "residual", "dx", "dweight", "dbias"]

    def ours():
        inputs = leaves(given)
        return gradients(ops.linear_residual(*inputs), [dy, residual], inputs)

    def plain(precision: torch.dtype):
        inputs = leaves(given, torch.float64 if precision == torch.float64 else None)
        return gradients((plain_linear(*inputs), inputs[0] * 1), [dy, residual], inputs)

    # In dx of the product, and of its sum with the residual's gradient.
    assert_as_good_as_pytorch(ours, plain, dtype, names[: 5 if bias else 4], roundings=2)
    # Alone it is the same, without the residual's gradient.
    inputs, alone = leaves(given), leaves(given)
    both = gradients(ops.linear_residual(*inputs), [dy, torch.zeros_like(inputs[0])], inputs)
    one = gradients((ops.linear(*alone),), [dy], alone)
    for got, want in zip(one, [both[0], *both[2:]], strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def close(got: Tensor, want: Tensor) -> None:
    """One rounding of a sum."""
    tolerance = 2 * torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


# One token; tokens that fill no bucket of algorithms; a whole bucket and one more.
PRODUCTS = pytest.mark.parametrize(
    ("dtype", "tokens"), [(dtype, tokens) for dtype in LOW for tokens in (1, 37, 129)]
)


@GPU
@PRODUCTS
def test_product_of_the_forward_pass(backend: Backend, dtype: torch.dtype, tokens: int) -> None:
    x, weight, bias = (t.to(dtype) for t in backend.put(draw((tokens, 24), (40, 24), (40,))))
    want, run = x.double() @ weight.double().T, torch.ops.bert_unpad.linear
    close(run(x, weight, None, False)[0], want)
    close(run(x, weight, bias, False)[0], want + bias.double())
    y, pre = run(x, weight, bias, True)
    close(pre, want + bias.double())
    close(y, F.gelu(want + bias.double(), approximate="tanh"))


@GPU
@PRODUCTS
def test_product_of_the_inputs_gradient(backend: Backend, dtype: torch.dtype, tokens: int) -> None:
    drawn = draw((tokens, 40), (40, 24), (tokens, 24), seed=1)
    dy, weight, other = (t.to(dtype) for t in backend.put(drawn))
    want, run = dy.double() @ weight.double(), torch.ops.bert_unpad.linear_dgrad
    close(run(dy, weight, None, None), want)
    close(run(dy, weight, other, None), want + other.double())
    pre = other.double().requires_grad_()
    F.gelu(pre, approximate="tanh").backward(want)
    close(run(dy, weight, None, other), pre.grad)


@GPU
@PRODUCTS
def test_product_of_the_weights_gradient(backend: Backend, dtype: torch.dtype, tokens: int) -> None:
    dy, x = (t.to(dtype) for t in backend.put(draw((tokens, 40), (tokens, 24), seed=2)))
    want, op = dy.double().T @ x.double(), torch.ops.bert_unpad
    for out_dtype in (dtype, torch.float32):
        for bias in (False, True):
            dweight, dbias = op.linear_wgrad(dy, x, bias, out_dtype)
            close(dweight, want)
            if bias:
                close(dbias, dy.double().sum(0))
        before = dweight.double()
        op.linear_wgrad_(dy, x, dweight, True, False)
        close(dweight, before + want)


@pytest.mark.parametrize("dtype", LOW)
def test_same_bits_every_time(backend: Backend, fused: bool, dtype: torch.dtype) -> None:
    tokens, (features, out) = (300, (128, 384)) if backend.name == "cuda" else (37, SIZES)
    drawn = backend.put(draw((tokens, features), (out, features), (out,), (tokens, out), seed=3))
    x, weight, bias, dy = (t.to(dtype) for t in drawn)

    def run() -> list[Tensor]:
        inputs = leaves([x, weight, bias])
        return gradients((ops.linear(*inputs),), [dy], inputs)

    backend.assert_same_bits(run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators(dtype) -> None:
    x, weight, bias, dy, pre = (
        t.to(dtype) for t in draw((5, 16), (8, 16), (8,), (5, 8), (5, 16), seed=2)
    )
    for gelu in (False, True):
        opcheck(torch.ops.bert_unpad.linear.default, (x, weight, bias, gelu))
    for addend, argument in ((None, None), (x, None), (None, pre)):
        opcheck(torch.ops.bert_unpad.linear_dgrad.default, (dy, weight, addend, argument))
    for with_bias in (False, True):
        opcheck(torch.ops.bert_unpad.linear_wgrad.default, (dy, x, with_bias, torch.float32))
        dweight = torch.randn(8, 16)
        for accumulate in (False, True):
            operands = (dy, x, dweight, accumulate, with_bias)
            opcheck(torch.ops.bert_unpad.linear_wgrad_.default, operands)


class TestAccumulation:
    def test_what_no_product_writes_is_named(self) -> None:
        weight = torch.zeros(16, 8, requires_grad=True)
        with (
            pytest.raises(
                RuntimeError, match=r"^first: expected weights .* others of \[\[16, 8\]\]"
            ),
            matmul.InPlaceGradients([weight]),
        ):
            pass
        with (
            matmul.InPlaceGradients(),
            pytest.raises(RuntimeError, match="expected one block at a time"),
            matmul.InPlaceGradients(),
        ):
            pass
        assert matmul.InPlaceGradients.current is None

    def test_can_be_taken_back(self) -> None:
        x, weight = draw((3, 8), (16, 8))
        weight.requires_grad_()
        ops.accumulate_in_place(weight)
        ops.linear_residual(x, weight)[0].sum().backward()
        seen = []
        weight.register_hook(seen.append)
        ops.linear_residual(x, weight)[0].sum().backward()
        assert seen == [None]  # it was added without autograd
        ops.accumulate_in_place(weight, False)
        ops.linear_residual(x, weight)[0].sum().backward()
        torch.testing.assert_close(weight.grad, 3 * seen[1])

    def test_goes_straight_into_the_buckets_of_ddp(self) -> None:
        first, second = mp.run_ranks(ddp_gradients, 2)
        for got, want in zip(first, second, strict=True):
            assert torch.equal(got, want)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(derived(0))
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y, residual = ops.mlp(x, self.inner.weight, self.inner.bias, self.outer.weight)
        return (y + residual).square().sum()


def ddp_gradients(rank: int, world_size: int) -> list[Tensor]:
    """Two steps of two passes each: gradients averaged in place are those of plain autograd."""
    results = []
    for in_place in (False, True):
        layer = Layer()
        for weight in (layer.inner.weight, layer.outer.weight):
            ops.accumulate_in_place(weight, in_place)
        replica = DistributedDataParallel(layer, gradient_as_bucket_view=True)
        torch.manual_seed(derived(1 + rank))
        places = set()
        for _ in range(3):
            for parameter in layer.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()
            with replica.no_sync():
                replica(torch.randn(4, 8)).backward()
            replica(torch.randn(4, 8)).backward()
            places.add(layer.inner.weight.grad.data_ptr())
        results.append([parameter.grad.clone() for parameter in layer.parameters()])
        assert len(places) <= 2  # DDP lays its buckets anew once, after the first step
    for plain, added in zip(*results, strict=True):
        torch.testing.assert_close(added, plain)
    return results[1]


def test_bad_input() -> None:
    x, weight1, weight2 = draw((5, 24), (40, 24), (16, 40))
    with pytest.raises(ValueError, match=r"^linear_residual: expected x \[..., in_features\] and"):
        ops.linear_residual(x, weight2)
    with pytest.raises(ValueError, match=r"bias must have shape \[40\], got \[3\]"):
        ops.linear(x, weight1, torch.zeros(3))
    with pytest.raises(ValueError, match=r"weight must be torch.bfloat16 like x or torch.float32"):
        ops.linear(x.bfloat16(), weight1.half())


def test_what_timing_refuses(tmp_path) -> None:
    with pytest.raises(TypeError, match=r"^enabled: expected a bool, got '.*algorithms.txt'"):
        ops.time_algorithms(str(tmp_path / "algorithms.txt"))
    with pytest.raises(ValueError, match=r"^path: expected None where enabled is False, got '"):
        ops.time_algorithms(False, path=tmp_path / "algorithms.txt")


def test_the_switch(monkeypatch) -> None:
    matmul._cublaslt_wanted.cache_clear()
    monkeypatch.setenv("BERT_UNPAD_CUBLASLT", "no")
    with pytest.raises(ValueError, match="BERT_UNPAD_CUBLASLT: expected 0 or 1, got 'no'"):
        matmul._cublaslt_wanted()
    monkeypatch.setenv("BERT_UNPAD_CUBLASLT", "0")
    assert not matmul._cublaslt_wanted()
    matmul._cublaslt_wanted.cache_clear()
