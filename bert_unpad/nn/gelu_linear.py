"""gelu(x + bias) W^T as one autograd node that does not keep the GELU's output.

The second product of the feed-forward half needs its input, the GELU's output, for the gradient of
its weight: intermediate_size numbers a token, a quarter of what a layer keeps. But the GELU keeps
its own input anyway, and its output is one pass over memory away from it. So this node keeps that
input alone and computes the output again in the backward pass (selective recomputation; Korthikanti
et al., 2022, arXiv:2205.05198). The same operators on the same numbers: no bit changes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bert_unpad import ops
from bert_unpad._ops.linear import _no_autocast, _product_dtype

__all__ = ["gelu_linear"]


def gelu_linear(x: Tensor, x_bias: Tensor, weight: Tensor, approximate: str) -> Tensor:
    """`ops.linear(ops.bias_gelu(x, x_bias), weight)`, keeping x, x_bias and weight only.

    Args:
        x: [rows, in_features], float32, bfloat16 or float16.
        x_bias: [in_features], x's dtype or float32.
        weight: [out_features, in_features], x's dtype or float32.
        approximate: "none" or "tanh", as in `ops.bias_gelu`.

    Returns:
        [rows, out_features] of x's dtype.

    Raises:
        RuntimeError, ValueError: as those two operators.
    """
    if torch.compiler.is_compiling():
        # A compiler joins equal nodes of the two passes and so would keep the output after all,
        # unless its own marks say not to. It drops the product, which nothing asks for twice.
        return checkpoint(
            _two_operators,
            *(x, x_bias, weight, approximate),
            use_reentrant=False,
            preserve_rng_state=False,
        )
    return _GeluLinear.apply(x, x_bias, weight, approximate)


def _two_operators(x: Tensor, x_bias: Tensor, weight: Tensor, approximate: str) -> Tensor:
    return ops.linear(ops.bias_gelu(x, x_bias, approximate=approximate), weight)


class _GeluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, x_bias: Tensor, weight: Tensor, approximate: str) -> Tensor:
        ctx.approximate = approximate
        ctx.save_for_backward(x, x_bias, weight)
        return _two_operators(x, x_bias, weight, approximate)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: Tensor):
        x, x_bias, weight = ctx.saved_tensors
        dtype = _product_dtype(x)
        # A backward pass that is run within autocast would take its products in another dtype.
        with _no_autocast(dy.device.type):
            dy = dy.to(dtype)
            dweight = dx = dx_bias = None
            if ctx.needs_input_grad[2]:
                y = ops.bias_gelu(x, x_bias, approximate=ctx.approximate)
                dweight = (dy.t() @ y.to(dtype)).to(weight.dtype)
                del y
            if any(ctx.needs_input_grad[:2]):
                dx, dx_bias = torch.ops.bert_unpad.bias_gelu_backward(
                    (dy @ weight.to(dtype)).to(x.dtype), x, x_bias, ctx.approximate == "tanh"
                )
        return dx, dx_bias, dweight, None
