"""Variable-length attention: functions, fake kernels and autograd over the C++ operators."""

import math
from collections.abc import Collection
from typing import Literal, get_args

import torch
from torch import Tensor

from bert_unpad.batch import VarlenBatch
from bert_unpad.ops import rng as _rng
from bert_unpad.ops.registration import register_autograd, register_fake

_ops = torch.ops.bert_unpad

AttentionSchedule = Literal["list", "groups"]
_SCHEDULES = get_args(AttentionSchedule)

HEAD_DIMS: dict[str, Collection[int]] = {"cpu": range(1, 129), "cuda": (32, 64, 128)}
"""The supported widths of one attention head, by type of device."""


def varlen_attention(
    qkv: Tensor,
    batch: VarlenBatch | Tensor,
    max_seqlen: int | None = None,
    *,
    dropout_p: float = 0.0,
    scale: float | None = None,
    rng: Tensor | None = None,
    schedule: AttentionSchedule = "list",
) -> Tensor:
    """Self-attention over packed sequences: softmax(q k^T * scale), dropout, times v.

    No token attends to another sequence, and no padding is computed. The result is exact. The
    forward pass reads the keys once; the backward pass recomputes the scores from the log-sum-exp,
    as in Dao et al., "FlashAttention" (NeurIPS 2022).

    Args:
        qkv: [tokens, 3, heads, head_dim], float32, bfloat16 or float16; any outer strides,
            contiguous in the last dimension; head_dim 1 to 128 on a CPU, 32, 64 or 128 on a GPU.
        batch: a VarlenBatch, or its int32 `cu_seqlens` [sequences + 1] on the data's device.
        max_seqlen: longest sequence, in tokens; needed with a bare `cu_seqlens`.
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
        RuntimeError: a shape, dtype, device or `cu_seqlens` is wrong; the message names it.
        ValueError: qkv does not have four dimensions, `schedule` is unknown, or `max_seqlen` is
            missing.
    """
    if schedule not in _SCHEDULES:
        raise ValueError(f"varlen_attention: schedule must be 'list' or 'groups', got {schedule!r}")
    order = groups = None
    if isinstance(batch, VarlenBatch):
        cu_seqlens, max_seqlen, order = batch.cu_seqlens, batch.max_seqlen, batch.order
        if schedule == "groups":
            groups = batch.group_sizes
    elif max_seqlen is None:
        raise ValueError("varlen_attention: max_seqlen is needed with a bare cu_seqlens")
    else:
        cu_seqlens = batch
    if qkv.dim() != 4:
        raise ValueError(
            "varlen_attention: qkv must have shape [tokens, 3, heads, head_dim], "
            f"got {list(qkv.shape)}"
        )
    scale = _scale(qkv) if scale is None else scale
    rng = _rng.draw(dropout_p, rng, qkv.device)
    return _ops.varlen_attention(qkv, cu_seqlens, max_seqlen, scale, dropout_p, rng, order, groups)[
        0
    ]


def varlen_cross_attention(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    dropout_p: float = 0.0,
    scale: float | None = None,
    rng: Tensor | None = None,
    order: Tensor | None = None,
) -> Tensor:
    """Attention of packed queries over packed keys of the same sequences.

    The last layer of BERT uses it to compute only the rows that the loss reads. A sequence without
    keys gives zeros.

    Args:
        q: [query tokens, heads, head_dim]; dtypes and strides as in `varlen_attention`.
        kv: [key tokens, 2, heads, head_dim], of q's dtype.
        cu_seqlens_q, cu_seqlens_k: int32 [sequences + 1] on the data's device.
        max_seqlen_q, max_seqlen_k: largest number of queries and of keys of a sequence.
        dropout_p, scale, rng: as in `varlen_attention`; the row of a mask is the number of the
            query within its sequence.
        order: int32 [sequences] on the data's device, the order in which a GPU starts the
            sequences; `VarlenBatch.order` of the keys is best. None starts them in their order.
            Results do not depend on it.

    Returns:
        The attention output, [query tokens, heads, head_dim], of q's dtype.

    Raises:
        RuntimeError: a shape, dtype, device or cu_seqlens is wrong; the message names it.
        ValueError: q does not have three dimensions.
    """
    if q.dim() != 3:
        raise ValueError(
            "varlen_cross_attention: q must have shape [query tokens, heads, head_dim], "
            f"got {list(q.shape)}"
        )
    scale = _scale(q) if scale is None else scale
    rng = _rng.draw(dropout_p, rng, q.device)
    return _ops.varlen_cross_attention(
        q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, dropout_p, rng, order
    )[0]


def _scale(x: Tensor) -> float:
    return 1.0 / math.sqrt(max(x.shape[-1], 1))  # the operator refuses a head_dim of 0


def _last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@register_fake("varlen_attention", host=["groups"])
def _(qkv, cu_seqlens, max_seqlen, scale, dropout_p, rng, order=None, groups=None):
    tokens, _, heads, head_dim = qkv.shape
    out = qkv.new_empty((tokens, heads, head_dim))
    return out, qkv.new_empty((heads, tokens), dtype=torch.float32)


@register_fake("varlen_attention_backward", host=["groups"])
def _(
    dout, qkv, out, lse, cu_seqlens, max_seqlen, scale, dropout_p, rng, order=None, groups=None
):  # fmt: skip
    return qkv.new_empty(qkv.shape)


@register_fake("varlen_cross_attention", host=["groups"])
def _(
    q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, dropout_p, rng,
    order=None, groups=None,
):  # fmt: skip
    tokens, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((heads, tokens), dtype=torch.float32)


@register_fake("varlen_cross_attention_backward", host=["groups"])
def _(
    dout, q, kv, out, lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, dropout_p,
    rng, order=None, groups=None,
):  # fmt: skip
    return q.new_empty(q.shape), kv.new_empty(kv.shape)


def _setup(ctx, inputs, output):
    qkv, cu_seqlens, max_seqlen, scale, dropout_p, rng, order, groups = inputs
    ctx.save_for_backward(qkv, *output, cu_seqlens, rng, order, groups)
    ctx.scalars = max_seqlen, scale, dropout_p
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, saved, dout, _dlse):
    qkv, out, lse, cu_seqlens, rng, order, groups = saved
    dqkv = _ops.varlen_attention_backward(
        _last_contiguous(dout), qkv, out, lse, cu_seqlens, *ctx.scalars, rng, order, groups
    )
    return dqkv, None, None, None, None, None, None, None


def _cross_setup(ctx, inputs, output):
    q, kv, cu_q, cu_k, max_q, max_k, scale, dropout_p, rng, order, groups = inputs
    ctx.save_for_backward(q, kv, *output, cu_q, cu_k, rng, order, groups)
    ctx.scalars = max_q, max_k, scale, dropout_p
    ctx.mark_non_differentiable(output[1])


def _cross_backward(ctx, saved, dout, _dlse):
    q, kv, out, lse, cu_q, cu_k, rng, order, groups = saved
    dq, dkv = _ops.varlen_cross_attention_backward(
        _last_contiguous(dout), q, kv, out, lse, cu_q, cu_k, *ctx.scalars, rng, order, groups
    )
    return dq, dkv, None, None, None, None, None, None, None, None, None


register_autograd("varlen_attention", _backward, _setup)
register_autograd("varlen_cross_attention", _cross_backward, _cross_setup)
