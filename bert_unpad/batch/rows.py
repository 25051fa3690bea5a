"""Gather and scatter of whole rows, and of padding; each is the backward pass of the other.

An index might occur twice, so PyTorch's backward pass of a gather adds rows up: with float atomics
on a GPU, row by row on a CPU. Here no index occurs twice, except for rows whose gradient is zero.
So the backward pass is a plain copy: it gives the same bits in every run and reads no old values.
"""

import torch
from torch import Tensor

from bert_unpad.batch.varlen import VarlenBatch


def gather_rows(x: Tensor, indices: Tensor) -> Tensor:
    """`x[indices]` along the first dimension. Differentiable.

    Args:
        x: [R, ...].
        indices: int64 [N], within 0 .. R - 1, on x's device. An index may occur twice only if the
            gradients of its rows are zero: the backward pass keeps only one of them.

    Returns:
        The gathered rows, [N, ...].
    """
    if not torch.is_grad_enabled():
        return x.index_select(0, indices)
    return _Gather.apply(x, indices)


def scatter_rows(x: Tensor, indices: Tensor, rows: int, value: float = 0) -> Tensor:
    """Copies row i of x to row indices[i] of a buffer filled with `value`. Differentiable.

    Args:
        x: [N, ...].
        indices: int64 [N], as in `gather_rows`.
        rows: number of rows R of the result.
        value: fills the rows that no index names.

    Returns:
        The buffer, [R, ...].
    """
    return _Scatter.apply(x, indices, rows, value)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, indices: Tensor) -> Tensor:
        ctx.rows = x.shape[0]
        ctx.save_for_backward(indices)
        return x.index_select(0, indices)

    @staticmethod
    def backward(ctx, dy: Tensor):
        (indices,) = ctx.saved_tensors
        return scatter_rows(dy, indices, ctx.rows), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, indices: Tensor, rows: int, value: float) -> Tensor:
        ctx.save_for_backward(indices)
        y = x.new_full((rows, *x.shape[1:]), value)
        if torch.compiler.is_compiling():  # by PyTorch 2.11, which forgets gradients of index_copy_
            return y.index_copy(0, indices, x)
        return y.index_copy_(0, indices, x)

    @staticmethod
    def backward(ctx, dy: Tensor):
        return gather_rows(dy, *ctx.saved_tensors), None, None, None


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
