"""Whole encoder layers as one operator, or one as two around attention, forward only, in float32 on
a CPU."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bert_unpad.ops.glu import GluKind, kind_number
from bert_unpad.ops.registration import register_fake, register_no_autograd
from bert_unpad.ops.tensor_checks import check_tensors

_ops = torch.ops.bert_unpad

FEATURES = 32
"""All numbers of features are multiples of it."""
LONGEST = 65536
"""The most features that a layer's linear layers take: sums in 8 bits are exact up to there."""


class Affine(NamedTuple):
    """A linear layer or a norm: y = x weight^T + bias, or x normalised, times weight, plus bias."""

    weight: Tensor
    """[out_features, in_features], float32, or what `pack_int8` makes of it; of a norm [hidden]."""
    bias: Tensor | None
    """float32 [out_features] or [hidden], or None."""


@dataclass(frozen=True)
class LayerParameters:
    """The parameters of an encoder layer."""

    query: Affine
    key: Affine
    value: Affine
    attention_out: Affine
    ffn_in: Affine
    ffn_gate: Affine | None
    """What the activation of `ffn_in` is multiplied by; None: nothing."""
    ffn_out: Affine
    norms: tuple[Affine | None, ...]
    """Three: before attention, of the sum of attention and residual, which there always is, and of
    the layer's output; None: there is none."""

    def tensors(self) -> list[Tensor]:
        """Returns all of them as the operator takes them."""
        linears: list[Affine | None] = [getattr(self, name) for name in LINEARS]
        return in_order([*linears, *self.norms])


LINEARS = ("query", "key", "value", "attention_out", "ffn_in", "ffn_gate", "ffn_out")
"""The linear layers of `LayerParameters`, in the operator's order; norms follow."""
_EMPTY = torch.empty(0)


def in_order(parts: Iterable[tuple[Tensor | None, Tensor | None] | None]) -> list[Tensor]:
    """Returns weights and biases one after the other, and an empty tensor for each None."""
    return [_EMPTY if t is None else t for part in parts for t in part or (None, None)]


class LayerShape(NamedTuple):
    """What a layer computes with its parameters."""

    heads: int
    kv_heads: int
    """Heads of keys and values; a divisor of `heads`."""
    head_dim: int
    """1 to 256."""
    intermediate: int
    """Features between `ffn_in` and `ffn_out`."""
    activation: GluKind
    rms: bool
    """Norms are RMSNorm, else LayerNorm."""
    norms_first: bool
    """Norms come before the halves, else after the residuals."""
    eps: tuple[float, ...]
    """The three norms' epsilons."""
    window: tuple[int, int] = (-1, -1)
    """How many tokens before and after its own a token sees; -1: all."""
    rotary: tuple[float, float] = (0.0, 1.0)
    """Base of the angles of rotary embeddings (0: none), and factor of the positions."""


def encoder_layers(
    x: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    parameters: Sequence[Tensor],
    shapes: Sequence[LayerShape],
    *,
    positions: Tensor | None = None,
    rows: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Computes encoder layers on packed tokens, without dropout and without a derivative.

    Weights in 8 bits are multiplied with activations that are rounded token by token. All the rest
    is float32; but where all weights of a layer are in 8 bits, its attention is computed in
    bfloat16 on CPUs that are faster at it.

    Args:
        x: hidden states [T, hidden], float32, on a CPU.
        cu_seqlens: int32 [B + 1]: sequence b owns the rows cu_seqlens[b] : cu_seqlens[b + 1].
        max_seqlen: upper bound on the length of a sequence.
        parameters: `LayerParameters.tensors()` of each layer in turn; all numbers of features are
            multiples of 32.
        shapes: what each layer computes with them.
        positions: int32 or int64 [T], where a shape has rotary embeddings.
        rows: the rows whose output is wanted, int64 [Q], ascending, and int32 [B + 1] as
            `cu_seqlens` of them; not with a window or rotary embeddings of the last layer. None:
            all.

    Returns:
        Hidden states, [T, hidden] or [Q, hidden].

    Raises:
        TypeError: x is not a tensor.
        ValueError: the activation is unknown.
        RuntimeError: a shape, dtype or device is wrong.
        NotImplementedError: a derivative of the result is asked for.
    """
    check_tensors("encoder_layers", {"x": x, "cu_seqlens": cu_seqlens}, {"positions": positions})
    positions_of_rows, cu_rows = rows or (None, None)
    return _ops.encoder_layers(
        *(x, cu_seqlens, max_seqlen, positions, positions_of_rows, cu_rows),
        *(parameters, *_numbers("encoder_layers", tuple(shapes))),
    )


def encoder_project(x: Tensor, parameters: Sequence[Tensor], shape: LayerShape) -> Tensor:
    """Computes queries, keys and values of a layer, for attention that `encoder_layers` has not.

    Args:
        x, parameters, shape: as in `encoder_layers`; there are no rotary embeddings.

    Returns:
        [T, heads + 2 * kv_heads, head_dim]: queries, keys, values.

    Raises:
        TypeError, ValueError, RuntimeError: as in `encoder_layers`.
    """
    check_tensors("encoder_project", {"x": x}, {})
    qkv = _ops.encoder_project(x, parameters, *_numbers("encoder_project", (shape,)))
    return qkv.unflatten(1, (-1, shape.head_dim))


def encoder_finish(
    x: Tensor, attended: Tensor, parameters: Sequence[Tensor], shape: LayerShape
) -> Tensor:
    """Computes a layer's output from attention's result.

    Args:
        x: the layer's input at these tokens, [T, hidden].
        attended: [T, heads, head_dim], float32.
        parameters, shape: as in `encoder_layers`.

    Returns:
        Hidden states, [T, hidden].

    Raises:
        TypeError, ValueError, RuntimeError: as in `encoder_layers`.
    """
    check_tensors("encoder_finish", {"x": x, "attended": attended}, {})
    numbers = _numbers("encoder_finish", (shape,))
    return _ops.encoder_finish(x, attended.flatten(1), parameters, *numbers)


@functools.lru_cache(256)
def _numbers(function: str, shapes: tuple[LayerShape, ...]) -> tuple[list[int], list[float]]:
    integers: list[int] = []
    numbers: list[float] = []
    for shape in shapes:
        head_dim = shape.head_dim
        integers += [shape.heads, shape.kv_heads, head_dim, shape.intermediate]
        integers += [kind_number(function, shape.activation), shape.rms, shape.norms_first]
        integers += shape.window
        numbers += [head_dim**-0.5, *shape.eps, *shape.rotary]
    return integers, numbers


def pack_int8(weight: Tensor) -> Tensor:
    """Rounds the weight of a linear layer to 8 bits, for `encoder_layers`.

    Each output feature has its own scale, the largest magnitude of its weights / 127.

    Args:
        weight: [out_features, in_features], float32, contiguous, finite; multiples of 32, and at
            most 65,536 in_features.

    Returns:
        uint8 [bytes]: the numbers in the order of the product, scales and sums. About a quarter of
        the weight's memory.

    Raises:
        TypeError: the weight is not a tensor.
        RuntimeError: shape or dtype are wrong, or a number is not finite.
    """
    check_tensors("pack_int8", {"weight": weight}, {})
    return _ops.encoder_pack_int8(weight.detach())


@register_fake("encoder_layers")
def _(x, rows):
    return x.new_empty(((x if rows is None else rows).shape[0], x.shape[1]))


@register_fake("encoder_project")
def _(x, shape):
    return x.new_empty((x.shape[0], (shape[0] + 2 * shape[1]) * shape[2]))


@register_fake("encoder_finish")
def _(x):
    return x.new_empty(x.shape)


@register_fake("encoder_pack_int8")
def _(weight):
    columns = (weight.shape[0] + 63) // 64 * 64
    return weight.new_empty((columns * (weight.shape[1] + 8),), dtype=torch.uint8)


for name in ("encoder_layers", "encoder_project", "encoder_finish", "encoder_pack_int8"):
    register_no_autograd(name)
