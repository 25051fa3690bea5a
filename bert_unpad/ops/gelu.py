"""Bias + GELU: function, fake kernels and autograd over the C++ operator."""

from typing import Literal

import torch
from torch import Tensor

from bert_unpad.ops.registration import register_autograd, register_fake
from bert_unpad.ops.tensor_checks import check_tensors

_ops = torch.ops.bert_unpad


def bias_gelu(
    x: Tensor, bias: Tensor | None = None, *, approximate: Literal["none", "tanh"] = "none"
) -> Tensor:
    """gelu(x + bias) in one pass over memory; the backward pass also sums the bias gradient.

    Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016). `"none"` is x Phi(x), as in BERT;
    `"tanh"` is that paper's approximation. Only x and bias are kept for the backward pass.

    Args:
        x: [..., hidden], float32, bfloat16 or float16.
        bias: [hidden], float32 or x's dtype, or None.
        approximate: "none" or "tanh", as in `torch.nn.functional.gelu`.

    Returns:
        The activations, [..., hidden], of x's dtype.

    Raises:
        TypeError: an argument is not a tensor.
        RuntimeError: a shape, dtype or device is wrong; the message names it.
        ValueError: `approximate` is unknown.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f'bias_gelu: approximate must be "none" or "tanh", got {approximate!r}')
    check_tensors("bias_gelu", {"x": x}, {"bias": bias})
    return call_bias_gelu(x.contiguous(), bias, approximate == "tanh")


@register_fake("bias_gelu")
def _(x):
    return x.new_empty(x.shape)


@register_fake("bias_gelu_backward")
def _(x, bias):
    dbias = x.new_empty((0,)) if bias is None else bias.new_empty(bias.shape)
    return x.new_empty(x.shape), dbias


def _backward(kept, dy):
    dx, dbias = _ops.bias_gelu_backward.default(dy.contiguous(), kept.x, kept.bias, kept.tanh)
    return {"x": dx, "bias": None if kept.bias is None else dbias}


call_bias_gelu = register_autograd("bias_gelu", _backward, ["x", "bias", "tanh"])
