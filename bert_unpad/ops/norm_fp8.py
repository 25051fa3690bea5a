"""Dropout + residual + norm, whose result is rounded to 8 bits too, with a delayed scale.

The scale is known beforehand, so on a GPU the kernel that normalises a row also writes it as
products take it, as it is and transposed (csrc/norm/norm.cu).
"""

import torch
from torch import Tensor

from bert_unpad.ops import matrix_checks
from bert_unpad.ops import rng as _rng
from bert_unpad.ops.delayed_scaling import DelayedScale
from bert_unpad.ops.fp8 import RoundedInput, fake_rounded, rounded_by_scale
from bert_unpad.ops.norm import (
    LAYER_NORM_EPS,
    RMS_NORM_EPS,
    check_norm,
    fake_norm,
    register_norm,
)
from bert_unpad.ops.registration import register_cpu, register_fake

_ops = torch.ops.bert_unpad
_NAME = "dropout_add_layer_norm_fp8"


def dropout_add_norm_fp8(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    scale: DelayedScale,
    *,
    dropout_p: float = 0.0,
    eps: float | None = None,
    x_bias: Tensor | None = None,
    rng: Tensor | None = None,
    rms: bool = False,
    return_sum: bool = False,
) -> RoundedInput | tuple[Tensor, RoundedInput]:
    """The results of `dropout_add_layer_norm`, the normalised sum also in E4M3.

    The 8-bit numbers are those that `quantize_by` makes of the normalised sum in x's dtype, bit for
    bit.

    Args:
        x: [rows, hidden], hidden a multiple of 16.
        residual, weight, bias, dropout_p, x_bias, rng, return_sum: as in `dropout_add_layer_norm`.
        scale: of the linear layer that takes the result. Where gradients are computed it notes the
            largest value, and the transposed matrix is made, which the backward pass needs.
        eps: added to the variance or the mean square; None: the default of
            `dropout_add_layer_norm` or `dropout_add_rms_norm`.
        rms: RMSNorm instead of LayerNorm; without a bias.

    Returns:
        The normalised sum, [rows, hidden]; with `return_sum` the sum before it.

    Raises:
        TypeError: an argument is not a tensor.
        RuntimeError: a shape, dtype, device or probability is wrong; the message names it.
    """
    check_norm("dropout_add_norm_fp8", x, residual, weight, bias, x_bias, rng)
    if eps is None:
        eps = RMS_NORM_EPS if rms else LAYER_NORM_EPS
    rng = _rng.draw(dropout_p, rng, x.device)
    residual = None if residual is None else residual.contiguous()
    graded = torch.is_grad_enabled()
    settings = (dropout_p, eps, rng, rms, return_sum)
    noted = (scale.scale, scale.largest if graded else None, graded)
    y, total, _mean, _rstd, q, q_kept = _ops.dropout_add_layer_norm_fp8(
        x.contiguous(), x_bias, residual, weight, bias, *settings, *noted
    )
    found = RoundedInput(y, (q, q_kept, scale.scale))
    return (total, found) if return_sum else found


@register_fake(_NAME)
def _(x, x_bias, residual, dropout_p, rms, return_sum, transpose):
    norm = fake_norm(x, x_bias, residual, dropout_p, rms, return_sum)
    return *norm, *fake_rounded(x, False, transpose)


@register_cpu(_NAME, matrix_checks.check_quantize_scaled)
def _(*arguments):
    *norm, scale, largest, transpose = arguments
    y, *others = _ops.dropout_add_layer_norm(*norm)
    return y, *others, *rounded_by_scale(y, False, transpose, scale, largest)


register_norm(_NAME, ["q", "q_transposed"])
