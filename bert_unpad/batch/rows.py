"""Gathering and scattering whole rows, each the other's backward pass.

PyTorch's backward pass of a gather adds rows up, since an index might occur twice: on a GPU with
float atomics, on a CPU row by row. Here none does (but for rows whose gradient is zero), so a plain
copy will do: the same bits in every run, and nothing is read first.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["gather_rows", "scatter_rows"]


def gather_rows(x: Tensor, indices: Tensor) -> Tensor:
    """`x[indices]` along the first dimension. Differentiable.

    Args:
        x: [R, ...].
        indices: int64 [N], within 0 .. R - 1, on x's device. An index may occur twice only if the
            rows' gradients are zero: the backward pass keeps one of them.

    Returns:
        [N, ...].
    """
    return _Gather.apply(x, indices)


def scatter_rows(x: Tensor, indices: Tensor, rows: int, value: float = 0) -> Tensor:
    """The opposite: a buffer filled with `value`, and row i of x at row indices[i]. Differentiable.

    Args:
        x: [N, ...].
        indices: int64 [N], as in `gather_rows`.
        rows: R, of the result.
        value: of the rows that no index names.

    Returns:
        [R, ...].
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
        return scatter_rows(dy, *ctx.saved_tensors, ctx.rows), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, indices: Tensor, rows: int, value: float) -> Tensor:
        ctx.save_for_backward(indices)
        return x.new_full((rows, *x.shape[1:]), value).index_copy_(0, indices, x)

    @staticmethod
    def backward(ctx, dy: Tensor):
        return gather_rows(dy, *ctx.saved_tensors), None, None, None
