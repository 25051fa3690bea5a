"""Gated linear units: function, fake kernels and autograd over the C++ operator."""

from typing import Literal, get_args

import torch
from torch import Tensor

from bert_unpad.ops.registration import register_autograd, register_fake
from bert_unpad.ops.tensor_checks import check_tensors

_ops = torch.ops.bert_unpad

GluKind = Literal["gelu", "gelu_tanh", "silu", "relu"]
_KINDS = get_args(GluKind)  # in the order of csrc/gelu/glu_kind.h


def glu(x: Tensor, kind: GluKind, bias: Tensor | None = None) -> Tensor:
    """act(a) * b of the halves [a, b] of x + bias, in one pass over memory.

    Gated linear units of Shazeer, "GLU Variants Improve Transformer" (2020, arXiv:2002.05202). Only
    x and bias are kept for the backward pass, which also sums the bias gradient.

    Args:
        x: [..., 2 * width], float32, bfloat16 or float16; the activation takes the first half.
        kind: the activation: "gelu" (GeGLU, exact, with erf), "gelu_tanh" (its tanh approximation),
            "silu" (SwiGLU) or "relu" (ReGLU).
        bias: [2 * width], float32 or x's dtype, or None.

    Returns:
        The gated activations, [..., width], of x's dtype.

    Raises:
        TypeError: an argument is not a tensor.
        RuntimeError: a shape, dtype or device is wrong; the message names it.
        ValueError: `kind` is unknown.
    """
    check_tensors("glu", {"x": x}, {"bias": bias})
    return call_glu(x.contiguous(), bias, kind_number("glu", kind))


def kind_number(function: str, kind: str) -> int:
    """Returns the operator's number of a kind; `function` is named in the error message."""
    if kind not in _KINDS:
        raise ValueError(f"{function}: kind must be one of {', '.join(_KINDS)}, got {kind!r}")
    return _KINDS.index(kind)


@register_fake("glu")
def _(x):
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@register_fake("glu_backward")
def _(x, bias):
    dbias = x.new_empty((0,)) if bias is None else bias.new_empty(bias.shape)
    return x.new_empty(x.shape), dbias


def _backward(kept, dy):
    dx, dbias = _ops.glu_backward.default(dy.contiguous(), kept.x, kept.bias, kept.kind)
    return {"x": dx, "bias": None if kept.bias is None else dbias}


call_glu = register_autograd("glu", _backward, ["x", "bias", "kind"])
