"""The sign_* operators on the model of a block."""

import ctypes
from functools import cache

import torch
from torch import Tensor

from gpu_model.block_model import Model
from gpu_model.build import KERNELS, load
from tests.support.backends import on_the_model
from tests.support.model_checks import DTYPES, Buffers


@cache
def model() -> Model:
    return Model(load(KERNELS / "sign_compress.cpp"))


def _sizes(value: Tensor | None, error: Tensor) -> tuple[int, int]:
    return DTYPES[torch.float32 if value is None else value.dtype], error.numel()


@on_the_model(model)
def sign_scale(value: Tensor | None, error: Tensor) -> Tensor:
    buffers, scale, blocks = Buffers(model()), torch.empty(()), ctypes.c_int64()
    model().call("sign_blocks", error.numel(), ctypes.byref(blocks))
    operands = map(buffers.read, (value, error))
    results = map(buffers.write, (scale, torch.empty(blocks.value)))
    model().call("sign_scale", *_sizes(value, error), *operands, *results)
    return scale


@on_the_model(model)
def sign_pack_(
    value: Tensor | None, error: Tensor, bits: Tensor, scale: Tensor, guard: Tensor | None
) -> None:
    buffers = Buffers(model())
    for tensor in (error, bits):
        model().register(tensor)
    value_, scale_, guard_ = map(buffers.read, (value, scale, guard))
    model().call("sign_pack", *_sizes(value, error), value_, error, bits, scale_, guard_)


def _mean(
    bits: Tensor, scales: Tensor, out: Tensor, factor: float, add: bool, follow: bool,
    guard: Tensor | None,
) -> None:  # fmt: skip
    buffers = Buffers(model())
    model().register(out)
    bits_, scales_, guard_ = map(buffers.read, (bits, scales, guard))
    sizes = (*bits.shape, out.numel())
    model().call("sign_mean", bits_, *sizes, scales_, out, factor, add, follow, guard_)


@on_the_model(model)
def sign_mean_(
    bits: Tensor, scales: Tensor, out: Tensor, factor: float, add: bool, guard: Tensor | None
) -> None:
    _mean(bits, scales, out, factor, add, False, guard)


@on_the_model(model)
def sign_unpack_(bits: Tensor, scales: Tensor, out: Tensor) -> None:
    _mean(bits, scales, out, 1.0, False, True, None)
