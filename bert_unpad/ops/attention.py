"""Variable-length attention: functions, fake kernels and autograd over the C++ operators."""

import math
from collections.abc import Callable, Collection
from operator import attrgetter
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from bert_unpad.batch import VarlenBatch
from bert_unpad.ops import rng as _rng
from bert_unpad.ops.position_bias import PositionBias
from bert_unpad.ops.registration import argument_names, register_autograd, register_fake
from bert_unpad.ops.tensor_checks import check_tensors, shown

_ops = torch.ops.bert_unpad

AttentionSchedule = Literal["list", "groups"]
_SCHEDULES = get_args(AttentionSchedule)

HEAD_DIMS: dict[str, Collection[int]] = {"cpu": range(1, 257), "cuda": (32, 64, 96, 128)}
"""The supported widths of one attention head, by type of device."""


def varlen_attention(
    qkv: Tensor,
    batch: VarlenBatch | Tensor,
    max_seqlen: int | None = None,
    *,
    num_heads: int | None = None,
    window: tuple[int, int] = (-1, -1),
    position_bias: PositionBias | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    rng: Tensor | None = None,
    schedule: AttentionSchedule = "list",
) -> Tensor:
    """Self-attention over packed sequences: softmax(q k^T * scale), dropout, times v.

    No token attends to another sequence, and no padding is computed. The result is exact. The
    backward pass recomputes the scores from the log-sum-exp, as in Dao et al., "FlashAttention"
    (NeurIPS 2022). Memory grows with the tokens, and time with the keys in the windows.

    Args:
        qkv: [tokens, 3, heads, head_dim], or with `num_heads` [tokens, num_heads + 2 * kv_heads,
            head_dim]: all heads of the queries, then of the keys, then of the values. float32,
            bfloat16 or float16; any outer strides, contiguous in the last dimension; head_dim 1 to
            256 on a CPU, 32, 64, 96 or 128 on a GPU.
        batch: a VarlenBatch, or its int32 `cu_seqlens` [sequences + 1] on the data's device: 0,
            then the running sum of the lengths.
        max_seqlen: longest sequence, in tokens; needed with a bare `cu_seqlens`.
        num_heads: heads of the queries, a multiple of kv_heads: query head h reads key head
            h // (num_heads / kv_heads) (Ainslie et al., arXiv 2305.13245). None: as many as keys.
        window: (left, right): a query sees the keys at most `left` tokens before and `right` after
            its own, both inclusive; -1 for no bound, so (-1, 0) is causal. A query that sees no key
            gives zeros.
        position_bias: added to the scaled scores, see `PositionBias`.
        dropout_p: probability in [0, 1) that an attention weight is dropped.
        scale: factor of q k^T; None means 1 / sqrt(head_dim).
        rng: int64 [2] (seed, offset) on the data's device; None draws one from PyTorch's default
            generator. The mask is a pure function of it and of (sequence, head, row, column).
        schedule: how a GPU starts the sequences of a VarlenBatch, longest first: "list" in one
            launch, "groups" in one concurrent launch per group of `batch.groups`. Results have the
            same bits; which is faster depends on the device. It has no effect on a CPU, or with a
            bare `cu_seqlens`, whose sequences start in their order.

    Returns:
        The attention output, [tokens, heads, head_dim], of qkv's dtype.

    Raises:
        TypeError: qkv is not a tensor, or `batch` is neither of both.
        RuntimeError: a shape, dtype, device or `cu_seqlens` is wrong; the message names it.
        ValueError: qkv does not have four dimensions (three with `num_heads`), `schedule` is
            unknown, `window` is not a pair, or `max_seqlen` is missing.
    """
    check_tensors("varlen_attention", {"qkv": qkv}, {"rng": rng})
    if schedule not in _SCHEDULES:
        raise ValueError(f"varlen_attention: schedule must be 'list' or 'groups', got {schedule!r}")
    order = groups = None
    if isinstance(batch, VarlenBatch):
        cu_seqlens, max_seqlen = batch.cu_seqlens, batch.max_seqlen
        order = batch.order_table.view(-1, 4)
        if schedule == "groups":
            groups = batch.group_sizes
    elif not isinstance(batch, Tensor):
        raise TypeError(
            "varlen_attention: batch: expected a VarlenBatch, such as VarlenBatch.from_lengths "
            f"makes of lengths, or an int32 tensor cu_seqlens, got {shown(batch)}"
        )
    elif max_seqlen is None:
        raise ValueError(
            "varlen_attention: max_seqlen: expected the length of the longest sequence with a bare "
            "cu_seqlens, got None; VarlenBatch.from_cu_seqlens finds it out"
        )
    else:
        cu_seqlens = batch
    dims, shape = 4, "[tokens, 3, heads, head_dim]"
    if num_heads is not None:
        dims, shape = 3, "[tokens, num_heads + 2 * kv_heads, head_dim]"
        if num_heads < 1:
            raise ValueError(f"varlen_attention: num_heads must be at least 1, got {num_heads}")
    if qkv.dim() != dims:
        raise ValueError(f"varlen_attention: qkv must have shape {shape}, got {list(qkv.shape)}")
    scale = scale_of(qkv, scale)
    rng = _rng.draw(dropout_p, rng, qkv.device)
    left, right = _window("varlen_attention", window)
    bias = _parts("varlen_attention", position_bias)
    return _call_attention(
        qkv, cu_seqlens, max_seqlen, scale, dropout_p, rng, order, groups, num_heads or 0, left,
        right, *bias,
    )[0]  # fmt: skip


def varlen_cross_attention(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    window: tuple[int, int] = (-1, -1),
    position_bias: PositionBias | None = None,
    query_positions: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    rng: Tensor | None = None,
    order: Tensor | None = None,
) -> Tensor:
    """Attention of packed queries over packed keys of the same sequences.

    The last layer of BERT uses it to compute only the rows that the loss reads. A query that sees
    no key gives zeros.

    Args:
        q: [query tokens, heads, head_dim]; dtypes and strides as in `varlen_attention`.
        kv: [key tokens, 2, kv_heads, head_dim], of q's dtype; heads is a multiple of kv_heads, as
            in `varlen_attention`.
        cu_seqlens_q, cu_seqlens_k: int32 [sequences + 1] on the data's device.
        max_seqlen_q, max_seqlen_k: largest number of queries and of keys of a sequence.
        window, position_bias: as in `varlen_attention`.
        query_positions: int32 [query tokens] on the data's device, the position of each query among
            the keys of its sequence, for windows and biases. None: queries are the last keys, so
            query i of n is at position keys - n + i. Fastest where positions are sorted within a
            sequence.
        dropout_p, scale, rng: as in `varlen_attention`; the row of a mask is the number of the
            query within its sequence.
        order: int32 [sequences] on the data's device, the order in which a GPU starts the
            sequences; `VarlenBatch.order` of the keys is best. None starts them in their order.
            Results do not depend on it.

    Returns:
        The attention output, [query tokens, heads, head_dim], of q's dtype.

    Raises:
        TypeError: an argument is not a tensor.
        RuntimeError: a shape, dtype, device or cu_seqlens is wrong; the message names it.
        ValueError: q does not have three dimensions, or `window` is not a pair.
    """
    check_tensors(
        "varlen_cross_attention",
        {"q": q, "kv": kv, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k},
        {"query_positions": query_positions, "rng": rng, "order": order},
    )
    if q.dim() != 3:
        raise ValueError(
            "varlen_cross_attention: q must have shape [query tokens, heads, head_dim], "
            f"got {list(q.shape)}"
        )
    scale = scale_of(q, scale)
    rng = _rng.draw(dropout_p, rng, q.device)
    left, right = _window("varlen_cross_attention", window)
    bias = _parts("varlen_cross_attention", position_bias)
    return _call_cross_attention(
        q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, dropout_p, rng, order,
        None, left, right, query_positions, *bias,
    )[0]  # fmt: skip


def scale_of(x: Tensor, scale: float | None) -> float:
    """Returns `scale`, or the default for heads as wide as x's last dimension where it is None."""
    if scale is not None:
        return scale
    return 1.0 / math.sqrt(max(x.shape[-1], 1))  # the operator refuses a head_dim of 0


def _window(name: str, window: tuple[int, int]) -> tuple[int, int]:
    if len(window) != 2:
        raise ValueError(f"{name}: window must be a pair (left, right), got {window!r}")
    return window


def _parts(function: str, bias: PositionBias | None) -> tuple[Tensor | None, ...]:
    if bias is None:
        return None, None, None, None
    names = {f"position_bias.{name}": getattr(bias, name) for name in ("table", "query", "key")}
    check_tensors(function, {"position_bias.buckets": bias.buckets}, names, read=True)
    table = None if bias.table is None else bias.table.float().contiguous()
    return bias.buckets, table, _rows(bias.query), _rows(bias.key)


def _rows(x: Tensor | None) -> Tensor | None:
    return None if x is None else _last_contiguous(x)


def _last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


@register_fake("varlen_attention", host=["groups"])
def _(qkv, num_heads):
    tokens, heads = qkv.shape[0], num_heads or qkv.shape[2]
    out = qkv.new_empty((tokens, heads, qkv.shape[-1]))
    return out, qkv.new_empty((heads, tokens), dtype=torch.float32)


@register_fake("varlen_attention_backward", host=["groups"])
def _(qkv, bias_table, bias_query, bias_key, table_gradient):
    table = bias_table if table_gradient else None
    return qkv.new_empty(qkv.shape), *_gradients_like(qkv, table, bias_query, bias_key)


@register_fake("varlen_cross_attention", host=["groups"])
def _(q):
    tokens, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((heads, tokens), dtype=torch.float32)


@register_fake("varlen_cross_attention_backward", host=["groups"])
def _(q, kv, bias_table, bias_query, bias_key, table_gradient):
    table = bias_table if table_gradient else None
    gradients = _gradients_like(q, table, bias_query, bias_key)
    return q.new_empty(q.shape), kv.new_empty(kv.shape), *gradients


def _gradients_like(data: Tensor, *parts: Tensor | None) -> list[Tensor]:
    return [data.new_empty(0) if x is None else x.new_empty(x.shape) for x in parts]


def _register_backward(name: str, differentiable: list[str]) -> Callable[..., Any]:
    """Registers the derivative of an operator whose backward operator takes, after the gradient,
    what it reads of the first one by the same names, and whether the table needs a gradient."""
    operator = getattr(_ops, f"{name}_backward").default
    read = argument_names(f"{name}_backward")[1:-1]
    read_of = attrgetter(*read)
    differentiable = [*differentiable, "bias_table", "bias_query", "bias_key"]

    def backward(kept, dout, _dlse):
        dout = _last_contiguous(dout)
        gradients = operator(dout, *read_of(kept), kept.needs("bias_table"))
        found = zip(differentiable, gradients, strict=True)
        return {argument: gradient for argument, gradient in found if kept.needs(argument)}

    return register_autograd(name, backward, read, constant=["lse"])


_call_attention = _register_backward("varlen_attention", ["qkv"])
_call_cross_attention = _register_backward("varlen_cross_attention", ["q", "kv"])
