"""Whole encoder layers as one operator, or one as two around attention, forward only, in float32 on
a CPU."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

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
    """[out_features, in_features], float32, or of `pack_weight`; of a norm [hidden]."""
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

    Rounded weights are multiplied with activations that are rounded alike, in 8 bits token by
    token. All the rest is float32; but where all weights of a layer are rounded, its attention is
    computed in bfloat16 on CPUs that are faster at it.

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


class EncoderEmbeddings(NamedTuple):
    """What is before and after the layers of an encoder, float32; None: there is none."""

    word: Tensor
    """[entries, hidden]; as all others it is contiguous."""
    position: Tensor | None
    token_type: Tensor | None
    """Without token types all tokens have the first."""
    norm: Affine | None
    """The norm of the sum; RMSNorm where the layers' is."""
    final_norm: Affine | None
    """The norm of the last layer's output."""
    eps: tuple[float, float]
    """What both norms add to the variance."""
    first_position: int = 0
    """The position of the first column."""
    padding_id: int = -1
    """Positions are counted from the ids that are not it, as in RoBERTa; -1: they are columns."""

    def tensors(self) -> list[Tensor]:
        """Returns all of them as the operator takes them."""
        tables = [self.word, self.position, self.token_type]
        return [_EMPTY if t is None else t for t in tables] + in_order([self.norm, self.final_norm])


ENCODER_RESULTS = {"hidden": 0, "mean": 1, "first": 2}
"""Results of `encoder_model` and their numbers in the operator."""


def encoder_model(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    token_type_ids: Tensor | None,
    embeddings: EncoderEmbeddings,
    parameters: Sequence[Tensor],
    shapes: Sequence[LayerShape],
    *,
    result: Literal["hidden", "mean", "first"] = "hidden",
    reads_first: bool = False,
) -> Tensor:
    """Computes a whole encoder of a padded batch, on its tokens alone, without a derivative.

    Args:
        input_ids: int64 [B, S], on a CPU.
        attention_mask: int64 or bool [B, S], 1 at tokens; None: all are.
        token_type_ids: int64 [B, S]; None: all 0.
        embeddings: what is before and after the layers.
        parameters, shapes: as in `encoder_layers`; there may be no layer.
        result: hidden states; the mean of each sequence's; or the first token's, of which the last
            layer then computes no others.
        reads_first: the caller reads the first column, which must not be padding.

    Returns:
        Float32 [B, S, hidden], with zeros at padding; or [B, hidden].

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: an activation, or the result, is unknown.
        RuntimeError: a shape, dtype or device is wrong, the mask has other values, or an id is not
            in its table.
        NotImplementedError: a derivative of the result is asked for.
    """
    optional = {"attention_mask": attention_mask, "token_type_ids": token_type_ids}
    check_tensors("encoder_model", {"input_ids": input_ids}, optional)
    if result not in ENCODER_RESULTS:
        raise ValueError(f"result: expected one of {', '.join(ENCODER_RESULTS)}, got {result!r}")
    out = _ops.encoder_model(
        *(input_ids, attention_mask, token_type_ids, embeddings.tensors()),
        *(embeddings.first_position, embeddings.padding_id, embeddings.eps, parameters),
        *(*_numbers("encoder_model", tuple(shapes)), ENCODER_RESULTS[result], reads_first),
    )
    return out.view(*input_ids.shape, out.shape[1]) if result == "hidden" else out


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


def pack_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Brings the weight of a linear layer into the order of a product, for `encoder_layers`.

    In 8 bits each output feature has its own scale, the largest magnitude of its weights / 127.

    Args:
        weight: [out_features, in_features], float32, contiguous; multiples of 32. In 8 bits finite,
            and at most 65,536 in_features.
        dtype: float32, int8, or bfloat16 where the CPU multiplies that.

    Returns:
        float32 [panels, in_features, features of a panel], which are as many as this kind of CPU
        takes; bfloat16 [panels, in_features / 2, 32]; or uint8 [bytes], the numbers, scales and
        sums, about a quarter of the memory.

    Raises:
        TypeError: the weight is not a tensor.
        RuntimeError: shape or dtype are wrong, in 8 bits a number is not finite, or this CPU does
            not multiply bfloat16.
    """
    check_tensors("pack_weight", {"weight": weight}, {})
    return _ops.encoder_pack(weight.detach(), dtype)


@register_fake("encoder_layers")
def _(x, rows):
    return x.new_empty(((x if rows is None else rows).shape[0], x.shape[1]))


@register_fake("encoder_model")
def _(ids, embeddings, result):
    rows = ids.shape[0] * (1 if result else ids.shape[1])
    return embeddings[0].new_empty((rows, embeddings[0].shape[1]))


@register_fake("encoder_project")
def _(x, shape):
    return x.new_empty((x.shape[0], (shape[0] + 2 * shape[1]) * shape[2]))


@register_fake("encoder_finish")
def _(x):
    return x.new_empty(x.shape)


@register_fake("encoder_pack")
def _(weight, dtype):
    out_features, in_features = weight.shape
    if dtype == torch.int8:
        columns = (out_features + 63) // 64 * 64
        return weight.new_empty((columns * (in_features + 8),), dtype=torch.uint8)
    if dtype == torch.bfloat16:
        return weight.new_empty((out_features // 16, in_features // 2, 32), dtype=dtype)
    panel = torch.library.get_ctx().new_dynamic_size()
    return weight.new_empty((-(-out_features // panel), in_features, panel))


for name in ("layers", "model", "project", "finish", "pack"):
    register_no_autograd(f"encoder_{name}")
