"""8-bit operators on the model of a block, and their products on the model of cuBLASLt."""

import ctypes
from collections.abc import Sequence
from functools import cache
from itertools import chain

import torch
from torch import Tensor

from bert_unpad.ops.fp8 import fp8_dtype
from gpu_model.block_model import Model
from gpu_model.build import KERNELS, load
from tests.support import model_norm
from tests.support.backends import on_the_model
from tests.support.model_checks import DTYPES, Buffers


@cache
def model() -> Model:
    return Model(load(KERNELS / "fp8.cpp"))


@cache
def gelu_model() -> Model:
    return Model(load(KERNELS / "gelu_fp8.cpp"))


class Rounded:
    """Matrices that a kernel writes in 8 bits: every byte of theirs."""

    def __init__(self, kernels: Model, like: Tensor, e5m2: bool, transpose: bool) -> None:
        rows, columns = like.shape
        shapes = (rows, columns), (columns, -(-rows // 16) * 16) if transpose else (0, 0)
        bytes_ = [torch.full(shape, 0x55, dtype=torch.uint8) for shape in shapes]
        self.pointers = [kernels.register(bytes_[0])]
        self.pointers.append(kernels.register(bytes_[1]) if transpose else None)
        self.q, self.kept = (x.view(fp8_dtype(e5m2)) for x in bytes_)


def _kept(kernels: Model, largest: Tensor | None) -> Tensor | None:
    """What a kernel reads and writes."""
    return None if largest is None else kernels.register(largest)


def _nans(kernels: Model, *shape: int) -> Tensor:
    return kernels.register(torch.full(shape, torch.nan))


@on_the_model(model)
def quantize_fp8(x: Tensor, e5m2: bool, transpose: bool) -> tuple[Tensor, Tensor, Tensor]:
    kernels, (rows, columns) = model(), x.shape
    sizes = (DTYPES[x.dtype], e5m2, rows, columns)
    Buffers(kernels).read(x)
    result, scale = Rounded(kernels, x, e5m2, transpose), kernels.register(torch.tensor(torch.nan))
    if x.numel() == 0:
        return result.q, result.kept, torch.ones(())
    count = ctypes.c_int64()
    kernels.call("fp8_partials", sizes[0], rows, columns, ctypes.byref(count))
    partials = _nans(kernels, count.value)
    kernels.call("fp8_quantize", *sizes, x, *result.pointers, scale, partials)
    return result.q, result.kept, scale


@on_the_model(model)
def quantize_fp8_scaled(
    x: Tensor, e5m2: bool, transpose: bool, scale: Tensor, largest: Tensor | None,
    sum: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    kernels, (rows, columns) = model(), x.shape
    buffers = Buffers(kernels)
    for operand in (x, scale):
        buffers.read(operand)
    result = Rounded(kernels, x, e5m2, transpose)
    sums = [_nans(kernels, count, columns) for count in (1, -(-rows // 64)) if sum]
    kernels.call(
        "fp8_scaled", DTYPES[x.dtype], e5m2, rows, columns, x, *result.pointers, scale,
        _kept(kernels, largest), *(sums or [None, None]),
    )  # fmt: skip
    return result.q, result.kept, sums[0][0] if sum else torch.empty(0)


@on_the_model(model)
def quantize_weights_fp8_(weights: Sequence[Tensor], *kept: Sequence[Tensor]) -> None:
    def pointers(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
        return (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))

    kernels = model()
    buffers = Buffers(kernels)
    for weight in weights:
        buffers.read(weight)
    for tensor in chain(*kept):
        kernels.register(tensor)
    sizes = [size for weight in weights for size in weight.shape]
    lists = (len(weights), (ctypes.c_int64 * len(sizes))(*sizes), pointers(weights))
    lists += tuple(map(pointers, kept))
    count = ctypes.c_int64()
    kernels.call("fp8_weights", *lists, None, ctypes.byref(count))
    kernels.call("fp8_weights", *lists, _nans(kernels, count.value), ctypes.byref(count))


def product(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None,
    sum_over_tokens: bool, out: Tensor, accumulate: bool,
) -> Tensor:  # fmt: skip
    """Writes `out`, or adds to it."""
    kernels = model()
    buffers, e5m2 = Buffers(kernels), torch.float8_e5m2
    if out.numel() == 0 or a.shape[1] == 0:
        return out if accumulate else out.zero_()
    if accumulate:
        kernels.register(out)
    else:
        buffers.write(out)
    operands = [buffers.read(t) for t in (a, b, a_scale, b_scale, bias)]
    sizes = (len(a), len(b), a.shape[1], sum_over_tokens)
    pointers = map(ctypes.c_void_p, operands)
    formats = (a.dtype == e5m2, b.dtype == e5m2)
    kernels.call("fp8_product", *formats, *sizes, *pointers, out, DTYPES[out.dtype], accumulate)
    return out


@on_the_model(model)
def fp8_product(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None,
    dtype: torch.dtype, sum_over_tokens: bool,
) -> Tensor:  # fmt: skip
    out = torch.empty(len(b), len(a), dtype=dtype)
    return product(a, b, a_scale, b_scale, bias, sum_over_tokens, out, False)


@on_the_model(model)
def fp8_product_(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor, accumulate: bool
) -> None:
    product(a, b, a_scale, b_scale, None, True, out, accumulate)


def _gelu(
    dy: Tensor | None, x: Tensor, bias: Tensor | None, tanh: bool, scale: Tensor,
    largest: Tensor | None, transpose: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    kernels, (rows, columns) = gelu_model(), x.shape
    if dy is not None and dy.numel() == 0:
        dy = dy.new_empty(16)  # an address, by which the library knows the backward pass
    buffers = Buffers(kernels)
    for operand in (dy, x, bias, scale):
        buffers.read(operand)
    result = Rounded(kernels, x, dy is not None, transpose)
    dbias, sums = x.new_empty(0), [None, None]
    if dy is not None and bias is not None:
        dbias = kernels.register(torch.full_like(bias, torch.nan))
        sums = [dbias, _nans(kernels, -(-rows // 64), columns)]
    dtypes = (DTYPES[x.dtype], DTYPES[x.dtype if bias is None else bias.dtype])
    operands = (x, bias, dy, scale, *result.pointers, _kept(kernels, largest), *sums)
    kernels.call("gelu_fp8", *dtypes, rows, columns, tanh, *operands)
    return result.q, result.kept, dbias


@on_the_model(gelu_model)
def bias_gelu_fp8(
    x: Tensor, bias: Tensor | None, tanh: bool, scale: Tensor, largest: Tensor | None,
    transpose: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _gelu(None, x, bias, tanh, scale, largest, transpose)[:2]


@on_the_model(gelu_model)
def bias_gelu_fp8_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, tanh: bool, scale: Tensor,
    largest: Tensor | None, transpose: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _gelu(dy, x, bias, tanh, scale, largest, transpose)


@on_the_model(model_norm.model)
def dropout_add_layer_norm_fp8(
    x: Tensor, x_bias: Tensor | None, residual: Tensor | None, weight: Tensor,
    bias: Tensor | None, dropout_p: float, eps: float, rng: Tensor | None, rms: bool,
    return_sum: bool, scale: Tensor, largest: Tensor | None, transpose: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    kernels = model_norm.model()
    buffers = Buffers(kernels)
    params, written = model_norm.forward_params(
        buffers, x, x_bias, residual, weight, bias, dropout_p, eps, rng, rms, return_sum
    )
    buffers.read(scale)
    result = Rounded(kernels, x, False, transpose)
    pointers = (scale, *result.pointers, _kept(kernels, largest))
    kernels.call("norm_fp8_forward", ctypes.byref(params), *pointers)
    return *written, result.q, result.kept
