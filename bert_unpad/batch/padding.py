"""Conversion between the padded [B, S, ...] and the packed [T, ...] layout."""

from __future__ import annotations

from torch import Tensor

from bert_unpad.batch.rows import gather_rows, scatter_rows
from bert_unpad.batch.varlen import VarlenBatch


def unpad(x: Tensor, batch: VarlenBatch) -> Tensor:
    """Drops the padding: [B, S, ...] -> [T, ...]. Differentiable.

    Raises:
        ValueError: the first two dimensions of x are not [batch_size, seqlen].
    """
    expected = (batch.batch_size, batch.seqlen)
    if x.dim() < 2 or tuple(x.shape[:2]) != expected:
        raise ValueError(f"x: expected shape {list(expected)} + [...], got {list(x.shape)}")
    return gather_rows(x.flatten(0, 1), batch.indices)


def pad(x: Tensor, batch: VarlenBatch, value: float = 0) -> Tensor:
    """Puts packed rows back into the padded layout: [T, ...] -> [B, S, ...]. Differentiable.

    Args:
        x: packed rows [T, ...].
        batch: how the rows are packed.
        value: fills the padding.

    Raises:
        ValueError: the number of rows is not the batch's token count.
    """
    if x.dim() < 1 or x.shape[0] != batch.total:
        raise ValueError(f"x: expected shape [{batch.total}, ...], got {list(x.shape)}")
    rows = scatter_rows(x, batch.indices, batch.batch_size * batch.seqlen, value)
    return rows.view(batch.batch_size, batch.seqlen, *x.shape[1:])
