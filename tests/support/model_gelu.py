"""bias_gelu and gated linear units on the model of a block."""

import ctypes
from functools import cache

import torch
from torch import Tensor

from gpu_model.block_model import Model
from gpu_model.build import KERNELS, load
from tests.support.backends import on_the_model
from tests.support.model_checks import DTYPES, Buffers, load_kernels


class GluCudaParams(ctypes.Structure):
    """Of csrc/gelu/glu_cuda.h."""

    _fields_ = (
        ("dtype", ctypes.c_int),
        ("bias_dtype", ctypes.c_int),
        *((name, ctypes.c_int64) for name in ("kind", "rows", "width")),
        *((name, ctypes.c_void_p) for name in ("x", "bias", "dy", "y", "dx", "dbias", "partials")),
        ("tickets", ctypes.c_void_p),
    )


@cache
def gelu_model() -> Model:
    return Model(load(KERNELS / "gelu.cpp"))


@cache
def glu_model() -> Model:
    return load_kernels("glu", "glu_params_size", GluCudaParams)


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1] if x.shape[-1] else 0


def _dtype(bias: Tensor | None) -> int:
    return 0 if bias is None else DTYPES[bias.dtype]


@on_the_model(gelu_model)
def bias_gelu(x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
    buffers, y = Buffers(gelu_model()), torch.empty_like(x)
    sizes = (DTYPES[x.dtype], _dtype(bias), _rows(x), x.shape[-1], tanh)
    pointers = (*map(buffers.read, (x, bias)), buffers.write(y))
    gelu_model().call("gelu_forward", *sizes, *pointers)
    return y


@on_the_model(gelu_model)
def bias_gelu_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, tanh: bool
) -> tuple[Tensor, Tensor]:
    kernels = gelu_model()
    buffers, dx = Buffers(kernels), torch.empty_like(x)
    dbias = x.new_empty(0) if bias is None else torch.empty_like(bias)
    rows, columns = _rows(x), x.shape[-1]
    sizes = (DTYPES[x.dtype], _dtype(bias), rows, columns, tanh)
    pointers = [*map(buffers.read, (x, bias, dy)), buffers.write(dx)]
    scratch = (ctypes.c_int64 * 2)()
    if bias is not None:
        kernels.call("gelu_scratch", DTYPES[x.dtype], rows, columns, x, dy, dx, scratch)
        partials = torch.empty(scratch[0], columns)
        pointers += [buffers.write(dbias), buffers.write(partials)]
    else:
        pointers += [None, None]
    with buffers.tickets(scratch[1]) as tickets:
        kernels.call("gelu_backward", *sizes, *pointers, tickets)
    return dx, dbias


def _glu_params(buffers: Buffers, x: Tensor, bias: Tensor | None, kind: int) -> GluCudaParams:
    return GluCudaParams(
        DTYPES[x.dtype], _dtype(bias), kind, _rows(x), x.shape[-1] // 2,
        *(buffers.read(t) for t in (x, bias)),
    )  # fmt: skip


@on_the_model(glu_model)
def glu(x: Tensor, bias: Tensor | None, kind: int) -> Tensor:
    buffers, y = Buffers(glu_model()), x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    params = _glu_params(buffers, x, bias, kind)
    params.y = buffers.write(y)
    glu_model().call("glu_forward", ctypes.byref(params))
    return y


@on_the_model(glu_model)
def glu_backward(dy: Tensor, x: Tensor, bias: Tensor | None, kind: int) -> tuple[Tensor, Tensor]:
    kernels = glu_model()
    buffers, dx = Buffers(kernels), torch.empty_like(x)
    dbias = x.new_empty(0) if bias is None else torch.empty_like(bias)
    params = _glu_params(buffers, x, bias, kind)
    params.dy, params.dx = buffers.read(dy), buffers.write(dx)
    scratch = (ctypes.c_int64 * 2)()
    if bias is not None:
        kernels.call("glu_scratch", ctypes.byref(params), scratch)
        params.dbias = buffers.write(dbias)
        params.partials = buffers.write(torch.empty(scratch[0], x.shape[-1]))
    with buffers.tickets(scratch[1]) as params.tickets:
        kernels.call("glu_backward", ctypes.byref(params))
    return dx, dbias
