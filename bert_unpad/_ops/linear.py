"""Linear layers whose weights stay fp32 while activations are bf16 or fp16.

On a GPU, and on CPUs that multiply bf16 natively, the weight is cast to the activations' dtype.
Other CPUs emulate 16-bit products: on one with AVX-512 but no bf16 instructions, PyTorch's bf16
matmul reaches 50 GFLOP/s where its fp32 matmul reaches 240. There the 16-bit activations are
widened, the product is taken in fp32, and its result is rounded once, which is also more accurate.
"""

import functools
import platform
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn import functional

from bert_unpad import _library as _library


@functools.cache
def cpu_multiplies_bf16() -> bool:
    """Whether this CPU has bf16 matrix or dot-product instructions."""
    from bert_unpad import _C

    if platform.machine() in ("x86_64", "AMD64"):
        return _C.cpu_isa() == "avx512_bf16"
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _product_dtype(x: Tensor) -> torch.dtype:
    if x.device.type != "cpu" or (x.dtype == torch.bfloat16 and cpu_multiplies_bf16()):
        return x.dtype
    return torch.float32


def _no_autocast(device_type: str) -> AbstractContextManager[object]:
    available = torch.amp.is_autocast_available(device_type)  # on the meta device it is not
    return torch.autocast(device_type, enabled=False) if available else nullcontext()


class _MixedLinear(torch.autograd.Function):
    """x W^T + b computed in `dtype`; gradients come back in each argument's own dtype."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        wide_weight = weight.to(dtype)
        ctx.weight_dtype = weight.dtype
        ctx.save_for_backward(x, wide_weight)
        wide_bias = None if bias is None else bias.to(dtype)
        return functional.linear(x.to(dtype), wide_weight, wide_bias).to(x.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor):
        # A backward pass that is run within autocast would take its products in another dtype.
        with _no_autocast(dy.device.type):
            return _MixedLinear._gradients(ctx, dy)

    @staticmethod
    def _gradients(ctx, dy: Tensor):
        x, weight = ctx.saved_tensors
        wide = dy.to(ctx.dtype)
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            dx = (wide @ weight).to(x.dtype)
        flat = wide.reshape(-1, wide.shape[-1])
        if ctx.needs_input_grad[1]:
            dweight = (flat.t() @ x.reshape(-1, x.shape[-1]).to(ctx.dtype)).to(ctx.weight_dtype)
        if ctx.needs_input_grad[2]:
            dbias = flat.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, dweight, dbias, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, in x's dtype, with weights of x's dtype or fp32.

    Args:
        x: [..., in_features], float32, bfloat16 or float16.
        weight: [out_features, in_features], x's dtype or float32 (master weights).
        bias: [out_features] or None, x's dtype or float32.

    Returns:
        [..., out_features] of x's dtype. Products are accumulated in fp32.

    Raises:
        ValueError: if the shapes or dtypes do not fit.
    """
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            "linear: expected x [..., in_features] and weight [out_features, in_features], "
            f"got {list(x.shape)} and {list(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"linear: bias must have shape [{weight.shape[0]}], got {list(bias.shape)}"
        )
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.dtype not in (x.dtype, torch.float32):
            raise ValueError(
                f"linear: {name} must be {x.dtype} like x or torch.float32, got {parameter.dtype}"
            )
    dtype = _product_dtype(x)
    with _no_autocast(x.device.type):
        if weight.dtype == x.dtype == dtype and (bias is None or bias.dtype == dtype):
            return functional.linear(x, weight, bias)
        return _MixedLinear.apply(x, weight, bias, dtype)
