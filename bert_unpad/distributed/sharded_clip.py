"""Clipping before the average under FSDP2, which reduces gradients to shards.

FSDP passes the whole gradient of one group of parameters to its reduce-scatter. Only there can a
rank's own contribution still be bounded. The groups are fixed, so the bounds are fixed too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bert_unpad._sharded_types import is_fsdp_module
from bert_unpad.distributed.bucket_clip import ClipReport
from bert_unpad.distributed.bucket_shares import Policy
from bert_unpad.distributed.shard_exchange import start_reduce_scatter
from bert_unpad.ops import clip_bucket_

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class ShardedClip:
    """`BucketClip` for FSDP2: clips the gradient of each module that `fully_shard` was called on.

    The squares of the bounds add up to max_norm^2, so the average's norm is at most max_norm. The
    gradient of a module that is not finite arrives as NaN on all ranks. Gradients must be reduced
    in float32 or bfloat16. With one rank FSDP does not call its reduce-scatter, and nothing is
    clipped.

    Args:
        max_norm: bound on the averaged gradient's norm.
        policy: equal or numel; see `BucketClip`.
        loss_scale: as in `BucketClip`.

    Raises:
        ValueError: the policy is another one, or max_norm is not positive.
    """

    def __init__(
        self, max_norm: float, policy: Policy = "numel", loss_scale: Tensor | None = None
    ) -> None:
        if policy not in ("equal", "numel"):
            raise ValueError(f"policy: expected equal or numel under FSDP, got {policy!r}")
        if not max_norm > 0:
            raise ValueError(f"max_norm: expected a number above 0, got {max_norm}")
        self._max_norm = float(max_norm)
        self._policy = policy
        self._loss_scale = loss_scale
        self._groups: list[_ClippedReduceScatter] = []

    def attach(self, model: nn.Module) -> ShardedClip:
        """Replaces the reduce-scatter of every group in `model` by one that clips first.

        Args:
            model: a model after all calls of `fully_shard`.

        Returns:
            This object.

        Raises:
            ValueError: no group has a parameter that requires a gradient.
        """
        sizes: dict[FSDPModule, int] = {}
        _count_groups(model, None, sizes, set())
        total = sum(sizes.values())
        if not total:
            raise ValueError("model: expected parameters that fully_shard manages, got none")
        for module, size in sizes.items():
            if not size:
                continue
            share = size / total if self._policy == "numel" else 1 / sum(map(bool, sizes.values()))
            bound = math.sqrt(share) * self._max_norm
            group = _ClippedReduceScatter(bound, self._loss_scale)
            module.set_custom_reduce_scatter(group)  # type: ignore[arg-type]
            self._groups.append(group)
        return self

    def report(self) -> ClipReport:
        """Reports on the latest reduction of each group, in the order of `model.modules()`.

        Raises:
            RuntimeError: nothing was reduced yet.
        """
        seen = [(group.bound, *group.found) for group in self._groups if group.found is not None]
        if not seen:
            raise RuntimeError("no gradient has been reduced yet")
        bounds, norms, finite = zip(*seen, strict=True)
        limits = torch.tensor(bounds).to(norms[0].device)
        return ClipReport(torch.stack(norms), limits, torch.stack(finite).all())


def _count_groups(
    module: nn.Module, owner: FSDPModule | None, sizes: dict[FSDPModule, int], seen: set[int]
) -> None:
    """Adds a module's parameters to the group of the nearest sharded module around it."""
    if is_fsdp_module(module):
        owner = module
        sizes.setdefault(owner, 0)
    for parameter in module.parameters(recurse=False):
        if owner is not None and parameter.requires_grad and id(parameter) not in seen:
            seen.add(id(parameter))
            sizes[owner] += parameter.numel()
    for child in module.children():
        _count_groups(child, owner, sizes, seen)


class _ClippedReduceScatter:
    """What FSDP2 calls in place of its reduce-scatter (its class is imported with FSDP2 alone)."""

    def __init__(self, bound: float, loss_scale: Tensor | None) -> None:
        self.bound, self.loss_scale = bound, loss_scale
        self.found: tuple[Tensor, Tensor] | None = None
        """The norm of the latest input, and whether the average is finite."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        if op != dist.ReduceOp.AVG:
            raise RuntimeError(
                f"ShardedClip: expected FSDP to average, got {op}; reduce in float32 or bfloat16, "
                "and set no divide factor"
            )
        if async_op:
            raise RuntimeError("ShardedClip: expected a synchronous reduction, got async_op=True")
        if self.loss_scale is not None:
            input_tensor.div_(self.loss_scale)
        norm = clip_bucket_(input_tensor, self.bound, factor=1.0 / group.size())
        start_reduce_scatter(input_tensor, output_tensor, group)()
        # A rank's input that is not finite is NaN throughout, so any number of the sum shows it.
        self.found = norm, output_tensor[:1].isfinite().all()
        return None
