"""Dropout + residual + LayerNorm: function, fake kernels and autograd over the C++ operator."""

import torch
from torch import Tensor

from bert_unpad.ops import rng as _rng
from bert_unpad.ops.registration import register_autograd, register_fake

_ops = torch.ops.bert_unpad


def dropout_add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    *,
    p: float = 0.0,
    eps: float = 1e-12,
    x_bias: Tensor | None = None,
    rng: Tensor | None = None,
) -> Tensor:
    """LayerNorm(residual + dropout(x + x_bias)) over the last dimension, in one pass over memory.

    The end of both halves of a BERT layer (Devlin et al., "BERT", NAACL 2019). Layer normalisation
    is that of Ba et al. (2016), with the biased variance. The backward pass recomputes the dropout
    mask and the normalised row instead of storing them. Parameter gradients are summed in a fixed
    order, so they have the same bits with any number of threads.

    Args:
        x: [..., hidden], float32, bfloat16 or float16.
        residual: of x's shape and dtype, or None.
        weight, bias: [hidden], both float32 or both of x's dtype.
        p: probability in [0, 1) that an element of x + x_bias is dropped; the others are scaled by
            the reciprocal of the keep rate. Pass 0 in evaluation.
        eps: added to the variance.
        x_bias: [hidden], float32 or x's dtype, or None.
        rng: int64 [2] (seed, offset) on the data's device; None draws one from PyTorch's default
            generator. The mask is a pure function of it and of (row, column).

    Returns:
        The normalised sum, [..., hidden], of x's dtype.

    Raises:
        RuntimeError: a shape, dtype, device or probability is wrong; the message names it.
    """
    rng = _rng.draw(p, rng, x.device)
    residual = None if residual is None else residual.contiguous()
    return _ops.dropout_add_layer_norm(x.contiguous(), x_bias, residual, weight, bias, p, eps, rng)[
        0
    ]


@register_fake("dropout_add_layer_norm")
def _(x, x_bias, residual, weight, bias, p, eps, rng):
    torch._check(
        x.dim() >= 1 and x.shape[-1] >= 1,
        lambda: (
            "dropout_add_layer_norm: x must have shape [..., hidden] with hidden >= 1, "
            f"got {list(x.shape)}"
        ),
    )
    rows = x.numel() // x.shape[-1]
    statistics = [x.new_empty((rows,), dtype=torch.float32) for _ in range(2)]
    return x.new_empty(x.shape), *statistics


@register_fake("dropout_add_layer_norm_backward")
def _(dy, x, x_bias, residual, weight, mean, rstd, p, rng):
    own_dresidual = residual is not None and p > 0.0
    return (
        x.new_empty(x.shape),
        x.new_empty(x.shape if own_dresidual else (0,)),
        x.new_empty((0,)) if x_bias is None else x_bias.new_empty(x_bias.shape),
        weight.new_empty(weight.shape),
        weight.new_empty(weight.shape),
    )


def _setup(ctx, inputs, output):
    x, x_bias, residual, weight, _bias, p, _eps, rng = inputs
    _y, mean, rstd = output
    ctx.save_for_backward(x, x_bias, residual, weight, mean, rstd, rng)
    ctx.p = p
    ctx.mark_non_differentiable(mean, rstd)


def _backward(ctx, saved, dy, _dmean, _drstd):
    x, x_bias, residual, weight, mean, rstd, rng = saved
    dx, dresidual, dx_bias, dweight, dbias = _ops.dropout_add_layer_norm_backward(
        dy.contiguous(), x, x_bias, residual, weight, mean, rstd, ctx.p, rng
    )
    if residual is None:
        dresidual = None
    elif ctx.p == 0.0:
        dresidual = dx
    return dx, None if x_bias is None else dx_bias, dresidual, dweight, dbias, None, None, None


register_autograd("dropout_add_layer_norm", _backward, _setup)
