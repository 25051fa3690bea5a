"""Clipping a rank's whole gradient after its backward pass and before the average over ranks.

Bucket-wise clipping is measured against this: it preserves the direction of each rank's gradient,
but cannot send anything before the backward pass has ended.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from bert_unpad.distributed.allreduce import Allreduce
from bert_unpad.distributed.bucket_clip import ClipReport
from bert_unpad.ops import clip_bucket_


class ClipBefore:
    """Clips this rank's gradient to `max_norm` and averages it over the ranks, in one allreduce.

    The average's norm is at most max_norm, by the triangle inequality. A gradient that is not
    finite arrives as NaN on all ranks.

    Args:
        parameters: parameters whose gradients to average, in the same order on all ranks; those
            that require no gradient are ignored. A gradient of None counts as zero.
        max_norm: bound on the norm.
        wire_dtype: dtype in which gradients are sent, bfloat16 or float16; None keeps their own
            dtype (float32 if they differ).
        group: the ranks to average over; by default all.
        allreduce: sums over these ranks, for example `HierarchicalAllreduce`; by default
            `torch.distributed.all_reduce`.

    Raises:
        ValueError: no parameter requires a gradient.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        max_norm: float,
        wire_dtype: torch.dtype | None = None,
        group: dist.ProcessGroup | None = None,
        allreduce: Allreduce | None = None,
    ) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        if not self._parameters:
            raise ValueError("parameters: expected at least one that requires a gradient")
        self._sizes = [p.numel() for p in self._parameters]
        dtypes = {p.dtype for p in self._parameters}
        self._flat = torch.empty(
            sum(self._sizes),
            dtype=dtypes.pop() if len(dtypes) == 1 else torch.float32,
            device=self._parameters[0].device,
        )
        cast = wire_dtype is not None and self._flat.dtype == torch.float32
        self._wire = torch.empty_like(self._flat, dtype=wire_dtype) if cast else self._flat
        self._max_norm = float(max_norm)
        self._bound = torch.full((1,), self._max_norm, device=self._flat.device)
        self._group = group
        self._allreduce = allreduce

    def sync(self) -> ClipReport:
        """Clips and averages every `.grad`, after a backward pass under `no_sync`."""
        parts = self._flat.split(self._sizes)
        gradients = []
        for parameter, part in zip(self._parameters, parts, strict=True):
            gradient = parameter.grad
            if gradient is None:
                gradient = parameter.grad = torch.zeros_like(parameter)
            part.copy_(gradient.reshape(-1))
            gradients.append(gradient)
        norm = clip_bucket_(
            self._flat,
            self._max_norm,
            factor=1.0 / dist.get_world_size(self._group),
            out=None if self._wire is self._flat else self._wire,
        )
        if self._allreduce is None:
            dist.all_reduce(self._wire, group=self._group)
        else:
            self._allreduce(self._wire).wait()
        for gradient, part in zip(gradients, self._wire.split(self._sizes), strict=True):
            gradient.copy_(part.view_as(gradient))
        return ClipReport(norm.reshape(1), self._bound, self._wire[:1].isfinite().all())
