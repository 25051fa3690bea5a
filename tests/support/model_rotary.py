"""rotary_ and rotary on the model of a block."""

import ctypes
import math
from functools import cache

import torch
from torch import Tensor

from gpu_model.block_model import Model
from tests.support.backends import on_the_model
from tests.support.model_checks import DTYPES, load_kernels

MAX_PAIRS = 128


class RotaryCudaParams(ctypes.Structure):
    """Of csrc/rotary/rotary_cuda.h."""

    _fields_ = (
        ("dtype", ctypes.c_int),
        ("interleaved", ctypes.c_bool),
        ("wide_positions", ctypes.c_bool),
        *((name, ctypes.c_int64) for name in ("tokens", "heads", "pairs")),
        *((name, ctypes.c_void_p) for name in ("positions", "x")),
        *((name, ctypes.c_int64) for name in ("x_token_stride", "x_head_stride")),
        ("out", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("out_token_stride", "out_head_stride")),
        ("steps", ctypes.c_uint64 * MAX_PAIRS),
    )


@cache
def model() -> Model:
    return load_kernels("rotary", "rotary_params_size", RotaryCudaParams)


def _step(pair: int, theta: float, rotary_dim: int, scale: float, inverse: bool) -> int:
    """The turn from one position to the next in units of 2^-64, as csrc/rotary/arguments.h."""
    turns = scale * theta ** (-2 * pair / rotary_dim) / math.tau
    forwards = int(math.ldexp(turns % 1.0, 64))
    return -forwards % 2**64 if inverse else forwards


def _rotate(
    x: Tensor, out: Tensor, positions: Tensor, heads: int, theta: float, rotary_dim: int,
    interleaved: bool, position_scale: float, inverse: bool,
) -> None:  # fmt: skip
    kernels, pairs = model(), rotary_dim // 2
    kernels.clear()
    for tensor in (positions, x, out)[: 2 if out is x else 3]:
        memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        kernels.register(memory, writable=tensor is out)
    steps = [_step(i, theta, rotary_dim, position_scale, inverse) for i in range(pairs)]
    params = RotaryCudaParams(
        DTYPES[x.dtype], interleaved, positions.dtype == torch.int64, len(x), heads, pairs,
        positions.data_ptr(), x.data_ptr(), *x.stride()[:2], out.data_ptr(), *out.stride()[:2],
        (ctypes.c_uint64 * MAX_PAIRS)(*steps),
    )  # fmt: skip
    kernels.call("rotary_rotate", ctypes.byref(params))


@on_the_model(model)
def rotary_(x: Tensor, positions: Tensor, *settings) -> None:
    _rotate(x, x, positions, *settings)


@on_the_model(model)
def rotary(x: Tensor, positions: Tensor, heads: int, *settings) -> Tensor:
    out, rotary_dim = x.contiguous().clone(), settings[1]
    out[:, :heads, :rotary_dim] = torch.nan
    _rotate(x, out, positions, heads, *settings)
    return out
