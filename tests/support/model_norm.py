"""dropout_add_layer_norm and its other forms on the model of a block."""

import ctypes
from functools import cache

import torch
from torch import Tensor

from gpu_model.block_model import Model
from tests.support import reference
from tests.support.backends import on_the_model
from tests.support.model_checks import DTYPES, Buffers, load_kernels


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


def row_norm_params(
    buffers: Buffers, dtype: torch.dtype, rows: int, weight: Tensor, p: float, rng: Tensor | None
) -> RowNormParams:
    """What forward and backward kernels with a norm get of it."""
    return RowNormParams(
        dtype=DTYPES[dtype],
        parameter_dtype=DTYPES[weight.dtype],
        rows=rows,
        hidden=len(weight),
        keep_threshold=reference.keep_threshold(p),
        rng=buffers.read(rng) if p else None,
        weight=buffers.read(weight),
    )


def set_forward(
    buffers: Buffers, norm: RowNormParams, bias: Tensor | None, eps: float, rms: bool = False
) -> tuple[Tensor, Tensor]:
    """Adds what only a forward pass gets of a norm; returns mean ([0] with rms) and rstd."""
    mean, rstd = torch.empty(0 if rms else norm.rows), torch.empty(norm.rows)
    norm.bias, norm.eps = buffers.read(bias), eps
    norm.mean, norm.rstd = None if rms else buffers.write(mean), buffers.write(rstd)
    return mean, rstd


def set_backward(
    buffers: Buffers, norm: RowNormParams, dy: Tensor, mean: Tensor | None, rstd: Tensor,
    weight: Tensor, bias: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Adds what only a backward pass gets of a norm; returns dweight and dbias."""
    dweight, dbias = torch.empty_like(weight), weight.new_empty(len(weight) if bias else 0)
    norm.dy, norm.mean, norm.rstd = (buffers.read(t) for t in (dy, mean, rstd))
    norm.dweight, norm.dbias = buffers.write(dweight), buffers.write(dbias) if bias else None
    return dweight, dbias


def forward_params(
    buffers: Buffers, x: Tensor, x_bias: Tensor | None, residual: Tensor | None, weight: Tensor,
    bias: Tensor | None, p: float, eps: float, rng: Tensor | None, rms: bool, return_sum: bool,
) -> tuple[NormCudaParams, tuple[Tensor, ...]]:  # fmt: skip
    """Parameters of a forward kernel; y, sum, mean and rstd."""
    y, total = torch.empty_like(x), torch.empty_like(x) if return_sum else x.new_empty(0)
    params = NormCudaParams(
        norm=row_norm_params(buffers, x.dtype, x.numel() // len(weight), weight, p, rng),
        x_bias_dtype=0 if x_bias is None else DTYPES[x_bias.dtype],
        x=buffers.read(x),
        x_bias=buffers.read(x_bias),
        residual=buffers.read(residual),
        y=buffers.write(y),
        sum=buffers.write(total) if return_sum else None,
    )
    return params, (y, total, *set_forward(buffers, params.norm, bias, eps, rms))


@on_the_model(model)
def dropout_add_layer_norm(
    x: Tensor, x_bias: Tensor | None, residual: Tensor | None, weight: Tensor,
    bias: Tensor | None, dropout_p: float, eps: float, rng: Tensor | None, rms: bool = False,
    return_sum: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    params, results = forward_params(
        Buffers(model()), x, x_bias, residual, weight, bias, dropout_p, eps, rng, rms, return_sum
    )
    model().call("norm_forward", ctypes.byref(params))
    return results


def _backward(
    buffers: Buffers, params: NormCudaParams, x: Tensor, x_bias: Tensor | None,
    own_dresidual: bool, dweight: Tensor, dbias: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    dx, none = torch.empty_like(x), x.new_empty(0)
    dresidual = torch.empty_like(x) if own_dresidual else none
    dx_bias = none if x_bias is None else torch.empty_like(x_bias)
    params.dx = buffers.write(dx)
    if own_dresidual:
        params.dresidual = buffers.write(dresidual)
    if x_bias is not None:
        params.dx_bias, params.x_bias_dtype = buffers.write(dx_bias), DTYPES[x_bias.dtype]
    scratch = (ctypes.c_int64 * 2)()
    model().call("norm_scratch", ctypes.byref(params), scratch)
    params.norm.partials = buffers.write(torch.empty(3, scratch[0], len(dweight)))
    with buffers.tickets(scratch[1]) as params.norm.tickets:
        model().call("norm_backward", ctypes.byref(params))
    return dx, dresidual, dx_bias, dweight, dbias


@on_the_model(model)
def dropout_add_layer_norm_backward(
    dy: Tensor, x: Tensor, x_bias: Tensor | None, residual: Tensor | None, weight: Tensor,
    mean: Tensor | None, rstd: Tensor, dropout_p: float, rng: Tensor | None, bias: bool = True,
) -> tuple[Tensor, ...]:  # fmt: skip
    buffers = Buffers(model())
    norm = row_norm_params(buffers, x.dtype, len(rstd), weight, dropout_p, rng)
    results = set_backward(buffers, norm, dy, mean, rstd, weight, bias)
    params = NormCudaParams(norm=norm, x=buffers.read(x), x_bias=buffers.read(x_bias))
    params.residual = buffers.read(residual)
    own = residual is not None and dropout_p > 0.0
    return _backward(buffers, params, x, x_bias, own, *results)


@on_the_model(model)
def dropout_add_norm_sum_backward(
    dy: Tensor, dsum: Tensor | None, sum: Tensor, x_bias: Tensor | None, weight: Tensor,
    mean: Tensor | None, rstd: Tensor, dropout_p: float, rng: Tensor | None, bias: bool,
    residual: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    buffers = Buffers(model())
    norm = row_norm_params(buffers, sum.dtype, len(rstd), weight, dropout_p, rng)
    results = set_backward(buffers, norm, dy, mean, rstd, weight, bias)
    params = NormCudaParams(norm=norm, of_sum=True, x=buffers.read(sum), dsum=buffers.read(dsum))
    return _backward(buffers, params, sum, x_bias, residual and dropout_p > 0.0, *results)
