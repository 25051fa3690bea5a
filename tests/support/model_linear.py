"""A linear layer's products on the model of cuBLASLt (gpu_model/cublaslt.h)."""

import ctypes
import shutil
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from gpu_model.block_model import Model
from gpu_model.build import KERNELS, load
from tests.support.backends import on_the_model
from tests.support.model_checks import DTYPES, Buffers


@cache
def model() -> Model:
    """The library of products; compiled on first use."""
    return Model(load(KERNELS / "linear.cpp"))


def own_library(folder: Path) -> Model:
    """A copy of the library for one test: nothing is chosen or set yet, and nothing warned of.

    Args:
        folder: where the copy is written.
    """
    shared = load(KERNELS / "linear.cpp")
    own = ctypes.CDLL(shutil.copy(shared._name, folder / "linear.so"))
    own.source = shared.source
    library = Model(own)
    library.configure()
    library.set_device()
    return library


def _sizes(x: Tensor, y: Tensor) -> tuple[int, int, int, int]:
    """Dtype, tokens and features of x [tokens, in] and y [tokens, out]."""
    assert x.dtype == y.dtype
    return DTYPES[x.dtype], len(x), x.shape[1], y.shape[1]


@on_the_model(model)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool) -> tuple[Tensor, Tensor]:
    assert weight.dtype == x.dtype
    y = x.new_empty(len(x), len(weight))
    pre = torch.empty_like(y) if gelu else x.new_empty(0)
    if y.numel() > 0:
        buffers = Buffers(model())
        pointers = [*map(buffers.read, (x, weight, bias)), buffers.write(y)]
        pointers.append(buffers.write(pre) if gelu else None)
        model().call("linear_forward", *_sizes(x, y), *pointers)
    return y, pre


@on_the_model(model)
def linear_dgrad(dy: Tensor, weight: Tensor, addend: Tensor | None, pre: Tensor | None) -> Tensor:
    assert weight.dtype == dy.dtype
    dx = dy.new_empty(len(dy), weight.shape[1])
    if dx.numel() > 0:
        buffers = Buffers(model())
        pointers = [*map(buffers.read, (dy, weight, addend, pre)), buffers.write(dx)]
        model().call("linear_dgrad", *_sizes(dx, dy), *pointers)
    return dx


def _wgrad(dy: Tensor, x: Tensor, dweight: Tensor, accumulate: bool, bias: bool) -> Tensor:
    dbias = dweight.new_zeros(dy.shape[1] if bias else 0)
    if len(x) == 0:
        if not accumulate:
            dweight.zero_()
    elif dweight.numel() > 0:
        buffers = Buffers(model())
        model().register(dweight)  # not as `write` does: it holds what is added to
        pointers = [*map(buffers.read, (dy, x)), accumulate, dweight, DTYPES[dweight.dtype]]
        pointers.append(buffers.write(dbias) if bias else None)
        model().call("linear_wgrad", *_sizes(x, dy), *pointers)
    return dbias


@on_the_model(model)
def linear_wgrad(dy: Tensor, x: Tensor, bias: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    dweight = torch.full((dy.shape[1], x.shape[1]), torch.nan, dtype=dtype)
    return dweight, _wgrad(dy, x, dweight, False, bias)


@on_the_model(model)
def linear_wgrad_(dy: Tensor, x: Tensor, dweight: Tensor, accumulate: bool, bias: bool) -> Tensor:
    return _wgrad(dy, x, dweight, accumulate, bias)
