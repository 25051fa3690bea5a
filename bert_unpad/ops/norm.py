"""LayerNorm and RMSNorm, alone and after dropout and residual: functions, fakes and autograd."""

from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

from bert_unpad.ops import rng as _rng
from bert_unpad.ops.registration import register_autograd, register_fake
from bert_unpad.ops.tensor_checks import check_tensors, shown

_ops = torch.ops.bert_unpad

LAYER_NORM_EPS = 1e-5
"""Added to the variance by default, as in PyTorch."""
RMS_NORM_EPS = 1e-6
"""Added to the mean square by default, as in most models that have an RMSNorm."""


class NormOptions(TypedDict):
    """What `dropout_add_layer_norm` and `dropout_add_rms_norm` take by name."""

    dropout_p: float
    eps: float
    x_bias: Tensor | None
    rng: Tensor | None
    return_sum: bool


def dropout_add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    eps: float = LAYER_NORM_EPS,
    x_bias: Tensor | None = None,
    rng: Tensor | None = None,
    return_sum: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """LayerNorm(residual + dropout(x + x_bias)) over the last dimension, in one pass over memory.

    The end of both halves of a BERT layer (Devlin et al., "BERT", NAACL 2019), and with
    `return_sum` what lies between two halves of a pre-norm layer (Xiong et al., 2020,
    arXiv:2002.04745). Layer normalisation is that of Ba et al. (2016), with the biased variance.
    The backward pass recomputes the dropout mask and the normalised row instead of storing them;
    of a sum that is returned it keeps that one instead of x and the residual. Parameter gradients
    are summed in a fixed order, so they have the same bits with any number of threads.

    Args:
        x: [..., hidden], float32, bfloat16 or float16.
        residual: of x's shape and dtype, or None.
        weight, bias: [hidden], both float32 or both of x's dtype; the bias may be None.
        dropout_p: probability in [0, 1) that an element of x + x_bias is dropped; the others are
            scaled by the reciprocal of the keep rate. Pass 0 in evaluation.
        eps: added to the variance; BERT's is 1e-12.
        x_bias: [hidden], float32 or x's dtype, or None.
        rng: int64 [2] (seed, offset) on the data's device; None draws one from PyTorch's default
            generator. The mask is a pure function of it and of (row, column).
        return_sum: also return residual + dropout(x + x_bias), rounded to x's dtype; that is then
            what is normalised.

    Returns:
        The normalised sum, [..., hidden], of x's dtype; with `return_sum` the sum and the
        normalised sum, which both have gradients.

    Raises:
        TypeError: an argument is not a tensor.
        RuntimeError: a shape, dtype, device or probability is wrong; the message names it.
    """
    name = "dropout_add_layer_norm"
    y, total = _add_norm(
        name, x, residual, weight, bias, dropout_p, eps, x_bias, rng, False, return_sum
    )
    return (total, y) if return_sum else y


def dropout_add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    *,
    dropout_p: float = 0.0,
    eps: float = RMS_NORM_EPS,
    x_bias: Tensor | None = None,
    rng: Tensor | None = None,
    return_sum: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMSNorm(residual + dropout(x + x_bias)); arguments and results of `dropout_add_layer_norm`.

    RMSNorm (Zhang and Sennrich, 2019, arXiv:1910.07467) divides a row by
    sqrt(mean of its squares + eps).
    """
    name = "dropout_add_rms_norm"
    y, total = _add_norm(
        name, x, residual, weight, None, dropout_p, eps, x_bias, rng, True, return_sum
    )
    return (total, y) if return_sum else y


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = LAYER_NORM_EPS
) -> Tensor:
    """LayerNorm of x over the last dimension, as in `dropout_add_layer_norm`.

    Unlike `torch.nn.functional.layer_norm` it takes no `normalized_shape`.
    """
    return _add_norm("layer_norm", x, None, weight, bias, 0.0, eps, None, None, False, False)[0]


def rms_norm(x: Tensor, weight: Tensor, eps: float = RMS_NORM_EPS) -> Tensor:
    """RMSNorm of x over the last dimension, as in `dropout_add_rms_norm`.

    Unlike `torch.nn.functional.rms_norm` it takes no `normalized_shape`.
    """
    return _add_norm("rms_norm", x, None, weight, None, 0.0, eps, None, None, True, False)[0]


def check_norm(
    function: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    x_bias: Tensor | None,
    rng: Tensor | None,
) -> None:
    """Checks the tensors of a norm before they are copied; `function` begins the message.

    Raises:
        TypeError: one is not a tensor.
        RuntimeError: the storage of one was freed.
    """
    if not isinstance(weight, Tensor):
        raise TypeError(
            f"{function}: weight: expected a tensor [hidden], got {shown(weight)}; there is no "
            "normalized_shape, x is normalised over its last dimension"
        )
    optional = {"residual": residual, "bias": bias, "x_bias": x_bias, "rng": rng}
    check_tensors(function, {"x": x, "weight": weight}, optional)


def _add_norm(
    function: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    eps: float,
    x_bias: Tensor | None,
    rng: Tensor | None,
    rms: bool,
    return_sum: bool,
) -> tuple[Tensor, Tensor]:
    check_norm(function, x, residual, weight, bias, x_bias, rng)
    rng = _rng.draw(dropout_p, rng, x.device)
    residual = None if residual is None else residual.contiguous()
    y, total, _mean, _rstd = _call_norm(
        x.contiguous(), x_bias, residual, weight, bias, dropout_p, eps, rng, rms, return_sum
    )
    return y, total


@register_fake("dropout_add_layer_norm")
def fake_norm(x, x_bias, residual, dropout_p, rms, return_sum):
    plain = x_bias is None and residual is None and dropout_p == 0
    function = f"{'' if plain else 'dropout_add_'}{'rms' if rms else 'layer'}_norm"
    torch._check(
        x.dim() >= 1 and x.shape[-1] >= 1,
        lambda: (
            f"{function}: x must have shape [..., hidden] with hidden >= 1, got {list(x.shape)}"
        ),
    )
    rows = x.numel() // x.shape[-1]
    mean, rstd = (x.new_empty((n,), dtype=torch.float32) for n in (0 if rms else rows, rows))
    return x.new_empty(x.shape), x.new_empty(x.shape if return_sum else (0,)), mean, rstd


def _fake_gradients(x, x_bias, weight, bias: bool, own_dresidual: bool):
    return (
        x.new_empty(x.shape),
        x.new_empty(x.shape if own_dresidual else (0,)),
        x.new_empty((0,)) if x_bias is None else x_bias.new_empty(x_bias.shape),
        weight.new_empty(weight.shape),
        weight.new_empty(weight.shape) if bias else x.new_empty((0,)),
    )


@register_fake("dropout_add_layer_norm_backward")
def _(x, x_bias, residual, weight, dropout_p, bias):
    return _fake_gradients(x, x_bias, weight, bias, residual is not None and dropout_p > 0.0)


@register_fake("dropout_add_norm_sum_backward")
def _(sum, x_bias, weight, dropout_p, bias, residual):
    return _fake_gradients(sum, x_bias, weight, bias, residual and dropout_p > 0.0)


def register_norm(name: str, constant: Sequence[str] = ()) -> Callable[..., Any]:
    """Registers the derivative of a norm, with its results that have none beside statistics.

    Returns what `register_autograd` does."""
    keep = ["x", "residual", "sum", "x_bias", "weight", "mean", "rstd", "dropout_p", "rng", "rms"]
    return register_autograd(
        name,
        _backward,
        [*keep, "return_sum"],
        ["mean", "rstd", *constant],
        unread=_unread,
    )


def _unread(kept) -> tuple[str, ...]:
    rows = ("x", "residual") if kept.return_sum else ("sum",)
    return (*rows, "mean") if kept.rms else rows


def _backward(kept, dy, dsum, *_):
    has_residual, has_bias = kept.needs("residual"), kept.needs("bias")
    statistics = (kept.weight, kept.mean, kept.rstd, kept.dropout_p, kept.rng, has_bias)
    rows = kept.sum if kept.return_sum else kept.x
    dy = torch.zeros_like(rows) if dy is None else dy.contiguous()
    if kept.return_sum:
        dsum = None if dsum is None else dsum.contiguous()
        gradients = _ops.dropout_add_norm_sum_backward.default(
            dy, dsum, rows, kept.x_bias, *statistics, has_residual
        )
    else:
        gradients = _ops.dropout_add_layer_norm_backward.default(
            dy, rows, kept.x_bias, kept.residual, *statistics
        )
    dx, dresidual, dx_bias, dweight, dbias = gradients
    return {
        "x": dx,
        "x_bias": None if kept.x_bias is None else dx_bias,
        "residual": (dx if kept.dropout_p == 0.0 else dresidual) if has_residual else None,
        "weight": dweight,
        "bias": dbias if has_bias else None,
    }


_call_norm = register_norm("dropout_add_layer_norm")
