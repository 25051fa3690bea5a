"""clip_bucket_ on the model of a block."""

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
    return Model(load(KERNELS / "clip.cpp"))


def _clip(
    bucket: Tensor, out: Tensor, residual: Tensor | None, max_norm: float, bound: Tensor | None,
    factor: float,
) -> Tensor:  # fmt: skip
    """`out` may be the bucket."""
    kernels = model()
    buffers, norm, blocks = Buffers(kernels), torch.empty(()), ctypes.c_int64()
    if out is not bucket:
        buffers.read(bucket)
        buffers.write(out)
    for tensor in (residual, bucket if out is bucket else None):
        if tensor is not None:
            kernels.register(tensor)
    common = (DTYPES[bucket.dtype], DTYPES[out.dtype], bucket.numel(), bucket, out, residual)
    kernels.call("clip_blocks", *common, ctypes.byref(blocks))
    partials = torch.empty(blocks.value)
    saved = [buffers.read(bound), max_norm, factor, *map(buffers.write, (partials, norm))]
    kernels.call("clip_bucket", *common, *saved)
    return norm


@on_the_model(model)
def clip_bucket_(bucket: Tensor, max_norm: float, bound: Tensor | None, factor: float) -> Tensor:
    return _clip(bucket, bucket, None, max_norm, bound, factor)


@on_the_model(model)
def clip_bucket_into(
    bucket: Tensor, out: Tensor, residual: Tensor | None, max_norm: float, bound: Tensor | None,
    factor: float,
) -> Tensor:  # fmt: skip
    return _clip(bucket, out, residual, max_norm, bound, factor)
