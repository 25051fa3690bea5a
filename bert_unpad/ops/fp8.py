"""Linear layers in 8 bits, with one scale per tensor.

Micikevicius et al., "FP8 Formats for Deep Learning" (2022, arXiv:2209.05433): E4M3 for activations
and weights, E5M2, with its larger range, for gradients. Each matrix is scaled by its own largest
value before it is rounded, or by that of earlier updates (`delayed_scaling.py`). Sums are fp32,
results have the activations' dtype, weights and their gradients are fp32.

On a GPU from sm_89 on these are cuBLASLt's 8-bit products, at twice the rate of 16 bits. The
matrices that the backward pass needs are kept in 8 bits, half the memory of 16-bit layers. A CPU
rounds in the same way and multiplies in fp32. That is slow, but shows what 8 bits do to a training
run.

A weight is rounded in every forward pass, or once an update where its optimizer keeps a
`QuantizedWeight`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bert_unpad._capability import multiplies
from bert_unpad.ops import matmul, matrix_checks
from bert_unpad.ops.delayed_scaling import DelayedScale, LinearScales
from bert_unpad.ops.linear_layer import check_linear
from bert_unpad.ops.registration import (
    first_order,
    register_cpu,
    register_fake,
    register_in_place,
)
from bert_unpad.ops.rounded_weights import WeightCopy, find_copy
from bert_unpad.ops.tensor_checks import check_tensors

_ops = torch.ops.bert_unpad
# cuBLASLt's 8-bit products need dimensions that are multiples of this.
_MULTIPLE = 16


def fp8_dtype(e5m2: bool) -> torch.dtype:
    """Returns the dtype of gradients, or of activations and weights."""
    return torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn


def _padded(rows: int) -> int:
    return (rows + _MULTIPLE - 1) // _MULTIPLE * _MULTIPLE


def fake_rounded(x: Tensor, e5m2: bool, transpose: bool) -> tuple[Tensor, Tensor]:
    """Returns what has the shapes and dtypes of x in 8 bits, as it is and transposed."""
    rows, columns = x.shape
    dtype = fp8_dtype(e5m2)
    kept = (columns, _padded(rows)) if transpose else (0, 0)
    return x.new_empty((rows, columns), dtype=dtype), x.new_empty(kept, dtype=dtype)


@register_fake("quantize_fp8")
def _(x, e5m2, transpose):
    return *fake_rounded(x, e5m2, transpose), x.new_empty((), dtype=torch.float32)


@register_fake("quantize_fp8_scaled")
def _(x, e5m2, transpose, sum):
    sums = x.new_empty((x.shape[1] if sum else 0,), dtype=torch.float32)
    return *fake_rounded(x, e5m2, transpose), sums


register_in_place("quantize_weights_fp8_")
register_in_place("fp8_product_")


@register_fake("fp8_product")
def _(a, b, dtype):
    return a.new_empty((b.shape[0], a.shape[0]), dtype=dtype)


def _rounded(wide: Tensor, e5m2: bool, inverse: Tensor, transpose: bool) -> tuple[Tensor, Tensor]:
    """Returns wide * inverse in 8 bits, and transposed as `quantize_fp8` says, by PyTorch."""
    limits = torch.finfo(fp8_dtype(e5m2))
    q = (wide * inverse).clamp(limits.min, limits.max).to(fp8_dtype(e5m2))
    if not transpose:
        return q, q.new_empty((0, 0))
    rows, columns = q.shape
    kept = torch.zeros(columns, _padded(rows), dtype=q.dtype)
    kept[:, :rows] = q.t()
    return q, kept


@register_cpu("quantize_fp8", matrix_checks.check_quantize)
def _(x, e5m2, transpose):
    limits = torch.finfo(fp8_dtype(e5m2))
    wide = x.float()
    largest = wide.abs().nan_to_num(0, posinf=torch.inf).amax() if x.numel() else wide.new_zeros(())
    zero = largest == 0
    scale = torch.where(zero, 1.0, largest / limits.max)
    # As the kernel divides; PyTorch would multiply a Python number by the reciprocal.
    inverse = wide.new_tensor(limits.max) / largest
    inverse = torch.where(zero, 1.0, inverse.clamp(max=torch.finfo(wide.dtype).max))
    return *_rounded(wide, e5m2, inverse, transpose), scale


@register_cpu("quantize_fp8_scaled", matrix_checks.check_quantize_scaled)
def _(x, e5m2, transpose, scale, largest, sum=False):
    sums = x.sum(0, dtype=torch.float32) if sum else x.new_empty(0, dtype=torch.float32)
    return *rounded_by_scale(x, e5m2, transpose, scale, largest), sums


def rounded_by_scale(
    x: Tensor, e5m2: bool, transpose: bool, scale: Tensor, largest: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns x / scale in 8 bits, and transposed as `quantize_fp8` says, by PyTorch; notes the
    largest value."""
    wide = x.float()
    if largest is not None and x.numel():
        own = wide.abs().nan_to_num(0, posinf=torch.inf).amax()
        largest[0].copy_(torch.maximum(largest[0], own))
    return _rounded(wide.where(wide.isfinite(), torch.nan), e5m2, scale.reciprocal(), transpose)


@register_cpu("quantize_weights_fp8_", matrix_checks.check_quantize_weights)
def _(weights, *kept):
    for weight, *tensors in zip(weights, *kept, strict=True):
        for tensor, value in zip(tensors, quantize_fp8(weight, False), strict=True):
            tensor.copy_(value)


def _wide_product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> Tensor:
    return (b.float() @ a.float().t()) * (a_scale * b_scale)


@register_cpu("fp8_product", matrix_checks.check_fp8_product)
def _(a, b, a_scale, b_scale, bias, dtype, sum_over_tokens):
    y = _wide_product(a, b, a_scale, b_scale)
    return (y if bias is None else y + bias).to(dtype)


@register_cpu("fp8_product_", matrix_checks.check_fp8_product_)
def _(a, b, a_scale, b_scale, out, accumulate):
    y = _wide_product(a, b, a_scale, b_scale)
    out.copy_(out + y if accumulate else y)


def quantize_fp8(x: Tensor, e5m2: bool, transpose: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Rounds x / scale to 8 bits; the scale maps the largest value to the format's largest.

    Args:
        x: [rows, columns], float32, bfloat16 or float16; columns a multiple of 16.
        e5m2: use E5M2, the format of gradients; else E4M3.
        transpose: also return the transposed matrix.

    Returns:
        q [rows, columns]; q transposed, [columns, rows padded with zeros to a multiple of 16] or
        [0, 0]; the scale, float32 []. Values that are not finite give NaN.

    Raises:
        RuntimeError: a shape or dtype is wrong.
    """
    return _ops.quantize_fp8(x, e5m2, transpose)


def quantize_by(
    x: Tensor, e5m2: bool, transpose: bool, scale: DelayedScale | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what `quantize_fp8` does, by a delayed scale if one is given.

    Values too large for that scale become the format's largest.
    """
    if scale is None:
        return quantize_fp8(x, e5m2, transpose)
    return *_ops.quantize_fp8_scaled(x, e5m2, transpose, *scale)[:2], scale.scale


def quantize_gradient(
    dy: Tensor, transpose: bool, scale: DelayedScale | None, bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns what `quantize_by` does of a gradient, and with `bias` the sum of its rows, float32
    [columns]."""
    if scale is None:
        return *quantize_fp8(dy, True, transpose), dy.sum(0, dtype=torch.float32) if bias else None
    q, kept, sums = _ops.quantize_fp8_scaled(dy, True, transpose, *scale, bias)
    return q, kept, scale.scale, sums if bias else None


def fp8_wgrad(
    x: Tensor, dy: Tensor, x_scale: Tensor, dy_scale: Tensor, weight: Tensor
) -> Tensor | None:
    """Returns a weight's gradient, of its dtype; None where it went to `weight.grad` (see
    `matmul.accumulate_in_place`).

    Args:
        x, dy: input and gradient of a linear layer in 8 bits, transposed.
        x_scale, dy_scale: their scales.
        weight: the parameter.
    """
    target = matmul.gradient_target(weight)
    if target is None:
        return _ops.fp8_product(x, dy, x_scale, dy_scale, None, weight.dtype, True)
    _ops.fp8_product_(x, dy, x_scale, dy_scale, *target)
    return None


# A matrix in 8 bits, transposed, and its scale, as `quantize_by` returns them.
Rounded = tuple[Tensor, Tensor, Tensor]


class RoundedInput(NamedTuple):
    """The input of a linear layer that what computed it has rounded too.

    `fp8_linear` and the feed-forward half take it in place of a tensor, and do not round.
    """

    x: Tensor
    """[rows, in_features], what has the gradient."""
    rounded: Rounded
    """The same in E4M3, by the delayed scale of this layer's input."""


def input_parts(x: Tensor | RoundedInput) -> tuple[Tensor, Rounded | None]:
    """Returns the tensor, and what it was rounded to, if it was."""
    return x if isinstance(x, RoundedInput) else (x, None)


class QuantizedWeight(WeightCopy):
    """A weight in E4M3, as `quantize_fp8` gives it.

    Args:
        weight: a float32 parameter, [out_features, in_features], both multiples of 16.

    Raises:
        ValueError: the weight has another shape.
    """

    def __init__(self, weight: Tensor) -> None:
        if weight.dim() != 2 or any(size % _MULTIPLE for size in weight.shape):
            raise ValueError(
                "params: expected matrices with multiples of 16 rows and columns for 8 bits, got "
                f"shape {list(weight.shape)}"
            )
        self.tensors = quantize_fp8(weight.detach(), False)
        super().__init__(weight)

    def renew(self, weight: Tensor) -> None:
        renew_quantized([(weight, self)])


def renew_quantized(kept: Sequence[tuple[Tensor, QuantizedWeight]]) -> None:
    """Rounds the weights that have changed again, all at once. They are on one device."""
    stale = [(weight, copy) for weight, copy in kept if not copy.fits(weight)]
    if not stale:
        return
    tensors = [list(each) for each in zip(*(copy.tensors for _, copy in stale), strict=True)]
    _ops.quantize_weights_fp8_([weight.detach() for weight, _ in stale], *tensors)
    for weight, copy in stale:
        torch.autograd.graph.increment_version(copy.tensors)
        copy.mark(weight)


def quantized(weight: Tensor, transpose: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a weight in E4M3: the copy that its optimizer keeps, if it is up to date."""
    copy = find_copy(weight, QuantizedWeight)
    return quantize_fp8(weight, False, transpose) if copy is None else copy.tensors


class _Fp8Linear(torch.autograd.Function):
    """x weight^T + bias, with all three products of the layer in 8 bits.

    x and weight are kept in 8 bits only. An empty second result is saved in their place, so that
    `first_order` finds an output of the node among the saved tensors.
    """

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scales: LinearScales | None,
        rounded: Rounded | None,
    ) -> tuple[Tensor, Tensor]:
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        ctx.gradient_scale = None if scales is None else scales.gradient
        q, q_kept, scale = rounded or quantize_by(x, False, needs_weight, scales and scales.input)
        w, w_kept, w_scale = quantized(weight, needs_x)
        bias_dtype = torch.bfloat16 if x.dtype == torch.float32 else x.dtype
        low_bias = None if bias is None else bias.to(bias_dtype)
        y = _ops.fp8_product(w, q, w_scale, scale, low_bias, x.dtype, False)
        inputs = x.new_empty(0)
        ctx.save_for_backward(q_kept, scale, w_kept, w_scale, weight, inputs)
        ctx.dtypes = x.dtype, None if bias is None else bias.dtype
        return y, inputs

    @staticmethod
    @first_order("fp8_linear")
    def backward(ctx, saved, dy: Tensor, _):
        x_kept, scale, w_kept, w_scale, weight, _inputs = saved
        x_dtype, bias_dtype = ctx.dtypes
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        dx = dweight = None
        q, q_kept, dy_scale, dbias = quantize_gradient(
            dy.contiguous(), needs_weight, ctx.gradient_scale, needs_bias
        )
        with matmul.no_autocast(dy.device.type):
            if needs_x:
                dx = _ops.fp8_product(w_kept, q, w_scale, dy_scale, None, x_dtype, False)
            if needs_weight:
                dweight = fp8_wgrad(x_kept, q_kept, scale, dy_scale, weight)
        return dx, dweight, None if dbias is None else dbias.to(bias_dtype), None, None


def fp8_linear(
    x: Tensor | RoundedInput,
    weight: Tensor,
    bias: Tensor | None = None,
    scales: LinearScales | None = None,
) -> Tensor:
    """x @ weight.T + bias with 8-bit products, forward and backward.

    x, weight and the gradient are each scaled by their largest value and rounded: x and weight to
    E4M3, the gradient to E5M2. Sums are computed in float32.

    Args:
        x: [rows, in_features], float32, bfloat16 or float16; in_features a multiple of 16. What is
            rounded already is not rounded again.
        weight: [out_features, in_features], x's dtype or float32; out_features a multiple of 16.
        bias: [out_features] or None, x's dtype or float32; added as bfloat16 if x is float32.
        scales: delayed scales of x and the gradient, in place of their own; see `DelayedScaling`.

    Returns:
        The output, [rows, out_features], of x's dtype. A matrix with a value that is not finite
        gives NaN.

    Raises:
        TypeError: x, weight or bias is not a tensor.
        ValueError: a shape or dtype is wrong.
        RuntimeError: a tensor is on another device than x or its storage was freed, or the GPU has
            no 8-bit products (it is older than sm_89).
    """
    x, rounded = input_parts(x)
    check_tensors("fp8_linear", {"x": x})
    if x.dim() != 2:
        raise ValueError(f"fp8_linear: x must have shape [rows, in_features], got {list(x.shape)}")
    check_linear("fp8_linear", x, weight, bias)
    check_fp8("fp8_linear", x, weight=weight)
    scales = None if scales is None else scales.of_this_pass()
    return _Fp8Linear.apply(x.contiguous(), weight.contiguous(), bias, scales, rounded)[0]


def check_fp8(function: str, x: Tensor, **weights: Tensor) -> None:
    """Checks that x's device multiplies in 8 bits, and matrices of these shapes."""
    for name, weight in weights.items():
        if weight.shape[0] % _MULTIPLE or weight.shape[1] % _MULTIPLE:
            raise ValueError(
                f"{function}: {name} must have multiples of 16 rows and columns, got "
                f"{list(weight.shape)}"
            )
    if not multiplies(x.device, "fp8"):
        raise RuntimeError(
            f"{function}: 8-bit products need a GPU of compute capability 8.9 or later, this is "
            f"{torch.cuda.get_device_name(x.device)}"
        )
