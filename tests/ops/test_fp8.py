"""Linear layers in 8 bits: rounding, gradients, and a model that trains with them."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from bert_unpad import ops
from bert_unpad.ops import matmul
from bert_unpad.ops.delayed_scaling import DelayedScale, DelayedScaling
from bert_unpad.ops.fp8 import (
    QuantizedWeight,
    quantize_by,
    quantize_fp8,
    quantize_gradient,
    renew_quantized,
)
from tests.nn.test_bert import make_inputs, make_model
from tests.support.backends import GPU, Backend
from tests.support.fp8_training import SIZES, assert_near, train
from tests.support.linear_cases import draw
from tests.support.op_checks import assert_same_numbers

ALL_BUT_CUDA = pytest.mark.backends("cpu", "block", "ptx")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# No row; one; a tile and a bit; several tiles for a block.
SHAPES = [
    *[(0, 16), (1, 16), (66, 80), (200, 144)],
    pytest.param((3000, 1040), marks=pytest.mark.backends("cuda")),
]
FORMATS = {False: torch.float8_e4m3fn, True: torch.float8_e5m2}  # by `e5m2`


def bytes_of(results: Sequence[Tensor]) -> list[Tensor]:
    return [t.flatten().view(torch.uint8) for t in results]


@GPU
@pytest.mark.sanitizer
@pytest.mark.parametrize("e5m2", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_quantisation(
    backend: Backend, shape: tuple[int, int], dtype: torch.dtype, e5m2: bool
) -> None:
    (x,) = draw(shape)
    x[-1:, -1] = 20  # the largest, at the end of a vector, a row and the matrix
    x = (3 * x).to(dtype)
    want = backend.on_cpu(quantize_fp8, x, e5m2)
    if x.numel() > 0:
        largest = x.float().abs().max().to(backend.device)
        limit = 2**-22 * largest
        assert (want[2] * torch.finfo(FORMATS[e5m2]).max - largest).abs() <= limit
    x = backend.put(x)
    for _ in backend.schedules_and_sizes():
        for a, b in zip(bytes_of(quantize_fp8(x, e5m2)), bytes_of(want), strict=True):
            assert torch.equal(a, b)
    q, kept, _ = quantize_fp8(x, e5m2, transpose=False)
    assert kept.numel() == 0
    assert torch.equal(q.view(torch.uint8), want[0].view(torch.uint8))


@pytest.mark.parametrize("value", [0.0, 1e-44, torch.inf, -torch.inf, torch.nan])
def test_quantisation_of_odd_values(backend: Backend, value: float) -> None:
    x = torch.zeros(3, 16)
    x[1, 5] = value
    got, want = quantize_fp8(backend.put(x), False), backend.on_cpu(quantize_fp8, x, False)
    assert_same_numbers(got, want)
    back = got[0].float() * got[2]
    assert back[1, 5].isfinite().item() == torch.tensor(value).isfinite().item()
    assert not torch.isfinite(torch.tensor(value)) or back.count_nonzero() <= 1


def by_scale(x: Tensor, e5m2: bool, transpose: bool, scale: float) -> list[Tensor]:
    """What a scale that is given rounds to, and the largest value that it notes."""
    noted = DelayedScale(torch.tensor(scale).to(x.device), torch.zeros(1024, device=x.device))
    return [*quantize_by(x, e5m2, transpose, noted)[:2], noted.largest.max()]


@GPU
@pytest.mark.sanitizer
@pytest.mark.parametrize("e5m2", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rounding_by_a_scale_that_is_given(
    backend: Backend, shape: tuple[int, int], dtype: torch.dtype, e5m2: bool
) -> None:
    (x,) = draw(shape)
    x = (3 * x).to(dtype)
    x[:1, 3], x[:1, 5], x[:1, 7] = torch.inf, torch.nan, 6e4
    scale = 1e-5 if e5m2 else 2e-3  # too small for some
    want = backend.on_cpu(by_scale, x, e5m2, True, scale)
    x = backend.put(x)
    for _ in backend.schedules_and_sizes():
        assert_same_numbers(by_scale(x, e5m2, True, scale), want)
    assert_same_numbers(by_scale(x, e5m2, False, scale)[:1], want[:1])


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_gradient_and_the_sum_of_its_rows(
    backend: Backend, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    dy = backend.put(draw(shape, seed=3)[0].to(dtype))
    wide = dy.double()
    bound = wide.abs().sum(0) * max(1, shape[0]) * torch.finfo(torch.float32).eps
    for _ in backend.schedules_and_sizes():
        noted = DelayedScale(*backend.put((torch.tensor(1e-4), torch.zeros(1024))))
        *results, _, sums = quantize_gradient(dy, True, noted, True)
        assert ((sums.double() - wide.sum(0)).abs() <= bound).all()
        want = by_scale(dy, True, True, 1e-4)
        assert_same_numbers([*results, noted.largest.max()], want)


@pytest.mark.sanitizer
def test_a_list_of_weights(backend: Backend) -> None:
    """More than a launch takes, of which some take several blocks; one of zeros; values that
    differ in size, so that one's scale is not another's."""
    shapes = [(16, 16), (80, 144), (128, 400), (48, 16), *64 * [(16, 32)]]
    if backend.name == "cuda":
        shapes.append((1024, 4096))
    weights = [x * 10 ** (i % 4) for i, x in enumerate(draw(*shapes, seed=4))]
    weights.append(torch.zeros(32, 16))
    want = [backend.on_cpu(quantize_fp8, -3 * weight, False) for weight in weights]
    weights = backend.put(weights)
    copies = [QuantizedWeight(weight) for weight in weights]
    for weight in weights:
        weight.mul_(-3)
    renew_quantized(list(zip(weights, copies, strict=True)))
    for weight, copy, each in zip(weights, copies, want, strict=True):
        assert copy.fits(weight)
        for a, b in zip(bytes_of(copy.tensors), bytes_of(each), strict=True):
            assert torch.equal(a, b)


@ALL_BUT_CUDA
@pytest.mark.parametrize("e5m2", FORMATS)
@pytest.mark.parametrize("factor", [1e-30, 1.0, 1e30])
def test_rounding_is_relative_to_the_largest_value(
    backend: Backend, factor: float, e5m2: bool
) -> None:
    (x,) = draw((37, 48))
    q, kept, scale = quantize_fp8(x * factor, e5m2)
    assert q.dtype == kept.dtype == FORMATS[e5m2]
    largest = torch.finfo(q.dtype).max
    assert q.float().abs().max() == largest
    assert torch.equal(kept[:, :37].float(), q.float().T)
    assert kept.shape == (48, 48)
    assert not kept[:, 37:].float().any()
    error = (q.double() * scale.double() - x.double() * factor).abs()
    relative = torch.finfo(q.dtype).eps / 2 * (x.double() * factor).abs()
    smallest = torch.finfo(q.dtype).smallest_normal * torch.finfo(q.dtype).eps / 2 * scale.double()
    assert (error <= 1.001 * torch.maximum(relative, smallest)).all()


def emulated(x: Tensor, e5m2: bool = False) -> Tensor:
    q, _, scale = quantize_fp8(x, e5m2, False)
    return q.double() * scale.double()


@ALL_BUT_CUDA  # whose tensor cores have a shorter accumulator: tests/cuda/test_fp8.py
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 37])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_the_rounded_matrices(
    backend: Backend, rows: int, dtype: torch.dtype, bias: bool
) -> None:
    x, weight, b, dy = draw((rows, 48), (32, 48), (32,), (rows, 32))
    x, dy = x.to(dtype).requires_grad_(), dy.to(dtype)
    weight.requires_grad_()
    b.requires_grad_()
    y = ops.fp8_linear(x, weight, b if bias else None)
    y.backward(dy)
    want = emulated(x.detach()) @ emulated(weight.detach()).T
    want = want + b.detach().bfloat16().double() if bias else want
    low = emulated(dy, True)
    wanted = [want, low @ emulated(weight.detach()), low.T @ emulated(x.detach())]
    for got, exact in zip([y.detach(), x.grad, weight.grad], wanted, strict=True):
        tolerance = 2 * torch.finfo(got.dtype).eps * 4
        torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance)
    if bias:
        torch.testing.assert_close(b.grad, dy.float().sum(0))


def test_only_what_is_asked_for_is_computed_and_kept() -> None:
    x, weight = draw((5, 16), (32, 16))
    weight.requires_grad_()
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = ops.fp8_linear(x, weight)
    # Of the weight no copy in 8 bits, which only the input's gradient needs.
    (inputs,) = [t for t in kept if t.numel() > 1 and t.data_ptr() != weight.data_ptr()]
    assert inputs.numel() == 16 * 16
    assert inputs.element_size() == 1
    y.sum().backward()
    assert weight.grad is not None


@ALL_BUT_CUDA
@pytest.mark.parametrize("delayed", [False, True])
def test_weight_gradients_can_be_added_in_place(backend: Backend, delayed: bool) -> None:
    x, dy = draw((37, 48), (37, 32))
    given = draw((64, 48), (64,), (32, 64), (32, 48), (32,))
    scaling = DelayedScaling(3)
    first, second, third = (scaling[layer] if delayed else None for layer in range(3))

    def run(leaves: list[Tensor]) -> None:
        scales = (first, second) if delayed else None
        y, _ = ops.mlp(x, *leaves[:3], fp8=True, scales=scales)
        (y + ops.fp8_linear(x, *leaves[3:], third)).backward(dy)

    plain, added = ([t.clone().requires_grad_() for t in given] for _ in range(2))
    weights = [added[0], added[2], added[3]]
    for weight in weights:
        ops.accumulate_in_place(weight)
        weight.grad = torch.full_like(weight, torch.nan)
    places = [weight.grad.data_ptr() for weight in weights]
    for leaves in (plain, added):
        with matmul.InPlaceGradients(weights if leaves is added else ()):
            for _ in range(2):
                run(leaves)
    assert places == [weight.grad.data_ptr() for weight in weights]
    for got, want in zip(added, plain, strict=True):
        torch.testing.assert_close(got.grad, want.grad)


def test_operators() -> None:
    x, other = draw((5, 32), (16, 32))
    for e5m2 in (False, True):
        for transpose in (False, True):
            opcheck(torch.ops.bert_unpad.quantize_fp8.default, (x, e5m2, transpose))
    kept = tuple([tensor] for tensor in quantize_fp8(other, False))
    opcheck(
        torch.ops.bert_unpad.quantize_weights_fp8_.default,
        ([other], *kept),
        test_utils="test_faketensor",
    )
    a, _, a_scale = quantize_fp8(other, False)
    b, _, b_scale = quantize_fp8(x, True)
    for bias in (None, torch.randn(16).bfloat16()):
        arguments = (a, b, a_scale, b_scale, bias, torch.bfloat16, False)
        # The schema's test multiplies its inputs, which PyTorch cannot in 8 bits.
        opcheck(torch.ops.bert_unpad.fp8_product.default, arguments, test_utils="test_faketensor")
    arguments = (a, b, a_scale, b_scale, torch.randn(5, 16), True)
    opcheck(torch.ops.bert_unpad.fp8_product_.default, arguments, test_utils="test_faketensor")


@pytest.mark.parametrize("recompute", ["none", "gelu", "layer"])
def test_a_model_trains(recompute) -> None:
    """A few steps: near those of bf16, and the same bits whatever is computed again."""
    losses = {}
    for fp8 in (False, True):
        model = make_model(**SIZES)
        losses[fp8] = train(model, make_inputs(), fp8=fp8, recompute=recompute)
        assert model.bert.encoder.fp8 == fp8
    assert losses[True] != losses[False]
    assert losses[True][-1] < losses[True][0] - 0.1
    assert_near(losses[True], losses[False])


def test_compiled() -> None:
    x, weight, bias, dy = draw((37, 48), (32, 48), (32,), (37, 32))
    results = []
    torch._dynamo.reset()
    compiled = torch.compile(ops.fp8_linear, fullgraph=True, backend="aot_eager")
    for function in (ops.fp8_linear, compiled):
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        y = function(*leaves)
        y.backward(dy)
        results.append([y.detach(), *(t.grad for t in leaves)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_a_value_that_is_not_finite_is_not_hidden() -> None:
    for value in (torch.inf, torch.nan):
        x, weight = draw((5, 16), (16, 16))
        x[2, 3] = value
        y = ops.fp8_linear(x, weight)
        assert y[2].isnan().all()


def test_bad_input() -> None:
    x, weight = draw((5, 16), (24, 16))
    with pytest.raises(ValueError, match=r"fp8_linear: x must have shape \[rows, in_features\]"):
        ops.fp8_linear(x[None], weight)
    with pytest.raises(ValueError, match=r"weight must have multiples of 16 .* got \[24, 16\]"):
        ops.fp8_linear(x, weight)
    with pytest.raises(ValueError, match="expected x"):
        ops.fp8_linear(x, weight.T)
