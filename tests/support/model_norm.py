"""Runs the CUDA kernels of dropout_add_layer_norm on the model of a block, on torch CPU tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from gpu_model.block_model import Model
from tests.support import reference
from tests.support.model_checks import DTYPES, load_kernels


class RowNormParams(ctypes.Structure):
    """Of csrc/cuda/norm_row_params.h."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("dtype", "parameter_dtype")),
        *((name, ctypes.c_int64) for name in ("rows", "hidden")),
        ("eps", ctypes.c_float),
        ("keep_threshold", ctypes.c_uint32),
        *((name, ctypes.c_void_p) for name in ("rng", "weight", "bias", "dy", "mean", "rstd")),
        *((name, ctypes.c_void_p) for name in ("dweight", "dbias", "partials", "tickets")),
    )


class NormCudaParams(ctypes.Structure):
    """Of csrc/norm/norm_cuda.h."""

    _fields_ = (
        ("norm", RowNormParams),
        ("x_bias_dtype", ctypes.c_int),
        ("of_sum", ctypes.c_bool),
        *((name, ctypes.c_void_p) for name in ("x", "x_bias", "residual", "dsum", "y", "dx")),
        *((name, ctypes.c_void_p) for name in ("sum", "dresidual", "dx_bias")),
    )


@cache
def model() -> Model:
    """The kernels' library; compiled on first use."""
    return load_kernels("norm", "norm_params_size", NormCudaParams)


class Buffers:
    """Tensors that kernels may touch, and their addresses."""

    def __init__(self, kernels: Model) -> None:
        self.kernels = kernels
        self.alive: list[Tensor] = []
        kernels.clear()

    def read(self, x: Tensor | None) -> int | None:
        if x is None:
            return None
        self.alive.append(self.kernels.register(x, writable=False))
        return x.data_ptr()

    def write(self, x: Tensor | None) -> int | None:
        if x is None:
            return None
        # Every element has to be written: NaN would show.
        self.alive.append(self.kernels.register(x.fill_(torch.nan)))
        return x.data_ptr()

    @contextmanager
    def tickets(self, count: int) -> Iterator[int]:
        """The address of counters for a kernel, which has to leave them as it gets them: zero."""
        counters = self.kernels.register(torch.zeros(count, dtype=torch.int32))
        yield counters.data_ptr()
        assert not counters.any()


def row_norm_params(
    buffers: Buffers, dtype: torch.dtype, rows: int, weight: Tensor, bias: Tensor | None, p: float,
    eps: float, rng: Tensor | None, dy: Tensor | None, rms: bool = False,
) -> tuple[RowNormParams, dict[str, Tensor]]:  # fmt: skip
    """What all kernels with a LayerNorm get, and the results that it points to."""
    results = {"rstd": torch.empty(rows), "dweight": torch.empty_like(weight)}
    if not rms:
        results["mean"] = torch.empty(rows)
    if bias is not None:
        results["dbias"] = torch.empty_like(bias)
    params = RowNormParams(
        dtype=DTYPES[dtype],
        parameter_dtype=DTYPES[weight.dtype],
        rows=rows,
        hidden=len(weight),
        eps=eps,
        keep_threshold=reference.keep_threshold(p),
        rng=buffers.read(rng) if p else None,
        weight=buffers.read(weight),
        bias=buffers.read(bias),
        dy=buffers.read(dy),
        **{name: buffers.write(x) for name, x in results.items()},
    )
    return params, results


def norm_params(
    buffers: Buffers,
    norm: ctypes.Structure,
    x: Tensor,
    x_bias: Tensor | None,
    residual: Tensor | None,
    results: dict[str, Tensor],
    dsum: Tensor | None = None,
) -> NormCudaParams:
    """What the kernels take; of the results those that there are."""
    return NormCudaParams(
        norm=norm,
        x_bias_dtype=0 if x_bias is None else DTYPES[x_bias.dtype],
        x=buffers.read(x),
        x_bias=buffers.read(x_bias),
        residual=buffers.read(residual),
        dsum=buffers.read(dsum),
        **{
            name: buffers.write(results.get(name))
            for name in ("y", "sum", "dx", "dresidual", "dx_bias")
        },
    )


def layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    x_bias: Tensor | None,
    dy: Tensor,
    *,
    p: float = 0.0,
    eps: float = 1e-5,
    rng: Tensor | None = None,
    rms: bool = False,
    return_sum: bool = False,
    dsum: Tensor | None = None,
) -> dict[str, Tensor]:
    """x, residual, dy and dsum are [rows, hidden]. y, dx, dresidual, dweight, dbias, dx_bias, mean,
    rstd and sum; without what there is no operand for, and with dresidual = dx where p is 0."""
    kernels = model()
    buffers = Buffers(kernels)
    norm, results = row_norm_params(
        buffers, x.dtype, len(x), weight, bias, p, eps, rng, dy, rms
    )  # fmt: skip
    if return_sum:
        results["sum"] = torch.empty_like(x)
    results |= {"y": torch.empty_like(x), "dx": torch.empty_like(x)}
    if residual is not None and p:
        results["dresidual"] = torch.empty_like(x)
    if x_bias is not None:
        results["dx_bias"] = torch.empty_like(x_bias)
    params = norm_params(buffers, norm, x, x_bias, residual, results, dsum)
    kernels.call("norm_forward", ctypes.byref(params))
    sizes = (ctypes.c_int64 * 2)()
    kernels.call("norm_scratch", ctypes.byref(params), sizes)
    rows, tickets = sizes
    params.norm.partials = buffers.write(torch.empty(3, rows, x.shape[1]))
    if return_sum:  # the backward pass gets nothing else
        params.of_sum, params.x = True, params.sum
        params.x_bias = params.residual = params.sum = None
    with buffers.tickets(tickets) as params.norm.tickets:
        kernels.call("norm_backward", ctypes.byref(params))
    if residual is not None and not p:
        results["dresidual"] = results["dx"]
    return results
