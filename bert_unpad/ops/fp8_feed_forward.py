"""The feed-forward half of a layer in 8 bits with delayed scales, as one autograd node.

The kernels of GELU, forward and backward, write their results in 8 bits (`gelu_fp8.py`). So of
[tokens, intermediate_size] only GELU's input and the gradient of its output have more bits.
"""

import torch
from torch import Tensor

from bert_unpad.ops import matmul
from bert_unpad.ops.delayed_scaling import LinearScales
from bert_unpad.ops.fp8 import Rounded, fp8_wgrad, quantize_by, quantized
from bert_unpad.ops.gelu_fp8 import bias_gelu_fp8, bias_gelu_fp8_backward
from bert_unpad.ops.registration import first_order

_ops = torch.ops.bert_unpad


class Fp8Mlp(torch.autograd.Function):
    """gelu(x weight1^T + bias1) weight2^T; see `fp8.py` on the empty second result."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight1: Tensor,
        bias1: Tensor | None,
        weight2: Tensor,
        tanh: bool,
        recompute: bool,
        scales: tuple[LinearScales, LinearScales],
        rounded: Rounded | None,
    ) -> tuple[Tensor, Tensor]:
        needs_x, needs_weight1, needs_bias1, needs_weight2, *_ = ctx.needs_input_grad
        first, second = scales
        q, q_kept, scale = rounded or quantize_by(x, False, needs_weight1, first.input)
        w1, w1_kept, w1_scale = quantized(weight1, needs_x)
        w2, w2_kept, w2_scale = quantized(weight2, needs_x or needs_weight1 or needs_bias1)
        pre = _ops.fp8_product(w1, q, w1_scale, scale, None, x.dtype, False)
        keep = needs_weight2 and not recompute
        inner, inner_kept = bias_gelu_fp8(pre, bias1, tanh, second.input, keep)
        y = _ops.fp8_product(w2, inner, w2_scale, second.input.scale, None, x.dtype, False)
        inputs = x.new_empty(0)
        ctx.save_for_backward(
            *(q_kept, scale, w1_kept, w1_scale, pre, bias1, inner_kept, w2_kept, w2_scale),
            *(weight1, weight2, inputs),
        )
        ctx.tanh, ctx.recompute, ctx.scales = tanh, recompute, scales
        ctx.dtype = x.dtype
        return y, inputs

    @staticmethod
    @first_order("mlp")
    def backward(ctx, saved, dy: Tensor, _):
        x_kept, scale, w1_kept, w1_scale, pre, bias1, inner_kept, w2_kept, w2_scale, *more = saved
        weight1, weight2, _inputs = more
        x_dtype = ctx.dtype
        needs_x, needs_weight1, needs_bias1, needs_weight2, *_ = ctx.needs_input_grad
        first, second = ctx.scales
        inner_scale, dpre_scale = second.input.scale, first.gradient.scale
        dx = dweight1 = dbias1 = dweight2 = None
        q, q_kept, dy_scale = quantize_by(dy.contiguous(), True, needs_weight2, second.gradient)
        with matmul.no_autocast(dy.device.type):
            if needs_weight2:
                if ctx.recompute:
                    _, inner_kept = bias_gelu_fp8(pre, bias1, ctx.tanh, second.input)
                dweight2 = fp8_wgrad(inner_kept, q_kept, inner_scale, dy_scale, weight2)
            del inner_kept
            if needs_x or needs_weight1 or needs_bias1:
                dinner = _ops.fp8_product(w2_kept, q, w2_scale, dy_scale, None, x_dtype, False)
                g, g_kept, dbias1 = bias_gelu_fp8_backward(
                    dinner, pre, bias1, ctx.tanh, first.gradient, needs_weight1
                )
                del dinner
            if needs_x:
                dx = _ops.fp8_product(w1_kept, g, w1_scale, dpre_scale, None, x_dtype, False)
            if needs_weight1:
                dweight1 = fp8_wgrad(x_kept, g_kept, scale, dpre_scale, weight1)
        dbias1 = dbias1 if needs_bias1 else None
        return dx, dweight1, dbias1, dweight2, None, None, None, None
