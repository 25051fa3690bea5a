"""The feed-forward half of a layer, linear - GELU or GLU - linear, as one autograd node.

The node keeps x, the input of the activation and its output, unless the backward pass should
compute the output again (selective recomputation; Korthikanti et al., 2022, arXiv:2205.05198). The
output takes intermediate_size numbers per token, the input as many, or twice as many for a GLU.

On a GPU the matrix products compute the tanh GELU and its derivative in their epilogues, which
saves two passes over [tokens, intermediate_size] in each direction. cuBLASLt supports only this
approximation, so BERT's own GELU, with erf, takes a fused kernel after the product.
"""

import functools
from typing import Literal, TypedDict

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bert_unpad.ops import matmul
from bert_unpad.ops.delayed_scaling import LinearScales
from bert_unpad.ops.fp8 import RoundedInput, check_fp8, fp8_linear, input_parts
from bert_unpad.ops.fp8_feed_forward import Fp8Mlp
from bert_unpad.ops.gelu import call_bias_gelu
from bert_unpad.ops.glu import GluKind, call_glu, kind_number
from bert_unpad.ops.linear_layer import check_linear, linear, linear_residual
from bert_unpad.ops.registration import first_order
from bert_unpad.ops.rounded_weights import rounded

_ops = torch.ops.bert_unpad

_TANH = ("bias_gelu", True)
# Of each name the operator and its derivative.
_ACTIVATIONS = {
    "bias_gelu": (call_bias_gelu, _ops.bias_gelu_backward.default),
    "glu": (call_glu, _ops.glu_backward.default),
}
# Of the first linear layer and the second.
MlpScales = tuple[LinearScales, LinearScales]


class MlpOptions(TypedDict):
    """What `mlp` and `glu_mlp` take by name."""

    recompute: bool
    fp8: bool
    scales: MlpScales | None


@functools.cache
def _epilogue_pays(device: torch.device) -> bool:
    """Whether GELU in the epilogue is fast; before Hopper it is reported slower than a kernel."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


def _activate(pre: Tensor, bias1: Tensor | None, activation: tuple[str, int]) -> Tensor:
    """The activation, an operator's name and kind, of `pre` plus the bias."""
    name, kind = activation
    return _ACTIVATIONS[name][0](pre, bias1, kind)


class _Mlp(torch.autograd.Function):
    """The feed-forward half, and x for the residual connection; see `linear_residual`."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight1: Tensor,
        bias1: Tensor | None,
        weight2: Tensor,
        activation: tuple[str, int],
        recompute: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = matmul.product_dtype(x)
        wide1, wide2 = rounded(weight1, dtype), rounded(weight2, dtype)
        # A GELU that is recomputed uses the same kernel both times.
        ctx.epilogue = (
            activation == _TANH
            and not recompute
            and matmul.fused(x, weight1)
            and _epilogue_pays(x.device)
        )
        if ctx.epilogue:
            # cuBLASLt's epilogue has no form without a bias.
            bias = wide1.new_zeros(wide1.shape[0]) if bias1 is None else bias1.to(dtype)
            inner, pre = _ops.linear.default(x, wide1, bias, True)
        else:
            pre = matmul.forward(x, wide1)
            inner = _activate(pre, bias1, activation)
        y = matmul.forward(inner, wide2)
        ctx.activation = activation
        ctx.save_for_backward(
            x, pre, None if recompute else inner, wide1, wide2, weight1, bias1, weight2
        )
        ctx.set_materialize_grads(False)
        return y, x.view_as(x)

    @staticmethod
    @first_order("mlp", ("x", "pre", "inner", "weight1", "weight2"))
    def backward(ctx, saved, dy: Tensor | None, addend: Tensor | None):
        if dy is None:
            return addend, None, None, None, None, None
        x, pre, inner, wide1, wide2, weight1, bias1, weight2 = saved
        needs_x, needs_weight1, needs_bias1, needs_weight2, *_ = ctx.needs_input_grad
        dx = dweight1 = dbias1 = dweight2 = None
        dy = dy.contiguous()
        # A backward pass within autocast would otherwise compute products in another dtype.
        with matmul.no_autocast(dy.device.type):
            if needs_weight2:
                if inner is None:
                    inner = _activate(pre, bias1, ctx.activation)
                dweight2, _ = matmul.wgrad(dy, inner, weight2, None)
            del inner
            if needs_x or needs_weight1 or needs_bias1:
                if ctx.epilogue:
                    dpre = _ops.linear_dgrad.default(dy, wide2, None, pre)
                else:
                    dinner = matmul.dgrad(dy, wide2)
                    name, kind = ctx.activation
                    dpre, dbias1 = _ACTIVATIONS[name][1](dinner, pre, bias1, kind)
                    del dinner
                if needs_weight1 or ctx.epilogue:
                    bias = bias1 if ctx.epilogue else None
                    dweight1, dbias = matmul.wgrad(dpre, x, weight1, bias)
                    dbias1 = dbias1 if dbias is None else dbias
            if needs_x:
                addend = None if addend is None else addend.contiguous()
                dx = matmul.dgrad(dpre, wide1, addend)
        return dx, dweight1, None if bias1 is None else dbias1, dweight2, None, None


def _second_half(
    pre: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    activation: tuple[str, int],
    fp8: bool,
    scales: LinearScales | None,
) -> Tensor:
    inner = _activate(pre, bias1, activation)
    return fp8_linear(inner, weight2, None, scales) if fp8 else linear(inner, weight2)


def mlp(
    x: Tensor | RoundedInput,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    *,
    approximate: Literal["none", "tanh"] = "none",
    recompute: bool = False,
    fp8: bool = False,
    scales: MlpScales | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns gelu(x weight1^T + bias1) weight2^T, and x for the residual connection around it.

    `dropout_add_layer_norm` adds the second bias.

    Args:
        x: [rows, features], float32, bfloat16 or float16; with `scales` it may be rounded already.
        weight1: [intermediate, features], x's dtype or float32.
        bias1: [intermediate], x's dtype or float32, or None.
        weight2: [out_features, intermediate], x's dtype or float32.
        approximate: "none" or "tanh", as in `torch.nn.functional.gelu`.
        recompute: compute the GELU's output again in the backward pass instead of keeping it.
            Results have the same bits, except with the tanh GELU on a GPU, which then takes a
            kernel instead of the product's epilogue.
        fp8: compute the products in 8 bits, see `fp8_linear`; with three autograd nodes.
        scales: with `fp8`, delayed scales of both linear layers, see `DelayedScaling`. What GELU
            and its backward pass write are then 8 bits at once, with one autograd node.

    Returns:
        The output, [rows, out_features], of x's dtype; and x, see `linear_residual`.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: a shape, a dtype or `approximate` is wrong, or there are scales without `fp8`.
        RuntimeError: a tensor is on another device than x, or its storage was freed.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f'mlp: approximate must be "none" or "tanh", got {approximate!r}')
    activation = ("bias_gelu", approximate == "tanh")
    return _feed_forward("mlp", x, weight1, bias1, weight2, activation, recompute, fp8, scales)


def glu_mlp(
    x: Tensor | RoundedInput,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    *,
    kind: GluKind = "silu",
    recompute: bool = False,
    fp8: bool = False,
    scales: MlpScales | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns glu(x weight1^T + bias1) weight2^T, and x for the residual connection around it.

    The feed-forward half with a gated linear unit (Shazeer, 2020, arXiv:2002.05202); see `glu`.

    Args:
        x: as in `mlp`.
        weight1: [2 * intermediate, features], x's dtype or float32; the first half of its rows
            gives what the activation takes, the second half the gate.
        bias1: [2 * intermediate], x's dtype or float32, or None.
        weight2: [out_features, intermediate], x's dtype or float32.
        kind: "gelu", "gelu_tanh", "silu" or "relu", as in `glu`.
        recompute: compute the GLU's output again in the backward pass instead of keeping it, with
            the same bits.
        fp8: as in `mlp`.
        scales: with `fp8`, delayed scales of both linear layers.

    Returns:
        The output, [rows, out_features], of x's dtype; and x, see `linear_residual`.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: a shape, a dtype or `kind` is wrong, or there are scales without `fp8`.
        RuntimeError: a tensor is on another device than x, or its storage was freed.
    """
    activation = ("glu", kind_number("glu_mlp", kind))
    return _feed_forward("glu_mlp", x, weight1, bias1, weight2, activation, recompute, fp8, scales)


def _feed_forward(
    function: str,
    x: Tensor | RoundedInput,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    activation: tuple[str, int],
    recompute: bool,
    fp8: bool,
    scales: MlpScales | None,
) -> tuple[Tensor, Tensor]:
    given = x
    x, rounded = input_parts(x)
    check_linear(function, x, weight1, bias1, "1", weight2=weight2)
    if x.dim() != 2:
        raise ValueError(f"{function}: x must have shape [rows, features], got {list(x.shape)}")
    inner = weight1.shape[0]
    if activation[0] == "glu":
        if inner % 2:
            raise ValueError(
                f"{function}: weight1 must have shape [2 * intermediate, features], "
                f"got {list(weight1.shape)}"
            )
        inner //= 2
    if weight2.dim() != 2 or weight2.shape[1] != inner:
        raise ValueError(
            f"{function}: expected weight2 [out_features, {inner}], got {list(weight2.shape)}"
        )
    if weight2.dtype not in (x.dtype, torch.float32):
        raise ValueError(
            f"{function}: weight2 must be {x.dtype} like x or torch.float32, got {weight2.dtype}"
        )
    if scales is not None and not fp8:
        raise ValueError(f"{function}: expected fp8=True with scales, got False")
    with matmul.no_autocast(x.device.type):
        if not fp8 and not (recompute and torch.compiler.is_compiling()):
            return _Mlp.apply(x.contiguous(), weight1, bias1, weight2, activation, recompute)
        first_scales, second_scales = scales or (None, None)
        if scales is not None and activation[0] == "bias_gelu":
            check_fp8(function, x, weight1=weight1, weight2=weight2)
            weights = (weight1.contiguous(), bias1, weight2.contiguous())
            noted = tuple(each.of_this_pass() for each in scales)
            more = (activation[1], recompute, noted, rounded)
            return Fp8Mlp.apply(x.contiguous(), *weights, *more)[0], x
        if fp8:
            pre = fp8_linear(given, weight1, None, first_scales)
        else:
            pre, x = linear_residual(x, weight1)
        second = (pre, bias1, weight2, activation, fp8, second_scales)
        if not recompute:
            return _second_half(*second), x
        # A compiler merges equal nodes of the two passes, and so would keep the output after all.
        # This checkpoint stops it. The compiler drops the unused second product.
        y = checkpoint(_second_half, *second, use_reentrant=False, preserve_rng_state=False)
        return y, x
