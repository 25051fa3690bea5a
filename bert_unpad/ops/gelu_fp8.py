"""Bias + GELU and its backward pass whose results are 8 bits, with delayed scales.

The scale is known beforehand, so on a GPU one kernel reads the operands and writes the result as
products take it, as it is and transposed (csrc/gelu/gelu_fp8.cu).
"""

import torch
from torch import Tensor

from bert_unpad.ops import matrix_checks
from bert_unpad.ops.delayed_scaling import DelayedScale
from bert_unpad.ops.fp8 import fake_rounded, rounded_by_scale
from bert_unpad.ops.registration import register_cpu, register_fake

_ops = torch.ops.bert_unpad


def bias_gelu_fp8(
    x: Tensor, bias: Tensor | None, tanh: bool, scale: DelayedScale, transpose: bool = True
) -> tuple[Tensor, Tensor]:
    """gelu(x + bias) / scale in E4M3.

    Args:
        x: [rows, columns], float32, bfloat16 or float16; columns a multiple of 16.
        bias: [columns], float32 or x's dtype, or None.
        tanh: use the tanh approximation.
        scale: of the result; notes its largest value too.
        transpose: also return the transposed matrix.

    Returns:
        q [rows, columns]; q transposed, [columns, rows padded with zeros to a multiple of 16] or
        [0, 0]. Values that are too large become the format's largest, those that are not finite
        NaN.

    Raises:
        RuntimeError: a shape or dtype is wrong.
    """
    return _ops.bias_gelu_fp8(x, bias, tanh, *scale, transpose)


def bias_gelu_fp8_backward(
    dy: Tensor,
    x: Tensor,
    bias: Tensor | None,
    tanh: bool,
    scale: DelayedScale,
    transpose: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of GELU's input divided by the scale in E5M2, and the gradient of the bias.

    Args:
        dy: the gradient of GELU's output, like x.
        x, bias, tanh, scale, transpose: as in `bias_gelu_fp8`.

    Returns:
        q and q transposed, as in `bias_gelu_fp8`; the bias's gradient, of its dtype, or [0].

    Raises:
        RuntimeError: a shape or dtype is wrong.
    """
    return _ops.bias_gelu_fp8_backward(dy, x, bias, tanh, *scale, transpose)


@register_fake("bias_gelu_fp8")
def _(x, transpose):
    return fake_rounded(x, False, transpose)


@register_fake("bias_gelu_fp8_backward")
def _(x, bias, transpose):
    dbias = x.new_empty((0,)) if bias is None else bias.new_empty(bias.shape)
    return *fake_rounded(x, True, transpose), dbias


@register_cpu("bias_gelu_fp8", matrix_checks.check_gelu)
def _(x, bias, tanh, scale, largest, transpose):
    y = _ops.bias_gelu(x.float(), None if bias is None else bias.float(), tanh)
    return rounded_by_scale(y, False, transpose, scale, largest)


@register_cpu("bias_gelu_fp8_backward", matrix_checks.check_gelu_backward)
def _(dy, x, bias, tanh, scale, largest, transpose):
    wide = None if bias is None else bias.float()
    dx, dbias = _ops.bias_gelu_backward(dy.float(), x.float(), wide, tanh)
    dbias = dbias.to(x.dtype if bias is None else bias.dtype)
    return *rounded_by_scale(dx, True, transpose, scale, largest), dbias
