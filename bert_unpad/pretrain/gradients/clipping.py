"""Clipping a step's gradient, and finding out whether it is finite.

`clip.mode` says where clipping stands: `bucket` and `before` bound what each rank contributes,
`after` bounds the average. Whatever the mode, an average that is not finite is the same on all
ranks, so all of them leave out that update without asking each other, on the device.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bert_unpad.distributed import BucketClip, ClipBefore
from bert_unpad.ops import multi_tensor_l2norm, multi_tensor_scale_
from bert_unpad.optim.parameter_lists import local, shard_groups
from bert_unpad.pretrain.config import ClipConfig
from bert_unpad.pretrain.gradients.comm_hook import CommHook
from bert_unpad.pretrain.gradients.graph_buckets import GraphBuckets
from bert_unpad.pretrain.gradients.loss_scale import LossScale
from bert_unpad.pretrain.ranks import Ranks

__all__ = ["Clipping", "GradientReport", "clip_gradients_"]

WIRE_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class GradientReport:
    """What a step's gradient was like; tensors on the device."""

    norm: Tensor
    """float32 []: before clipping; of the average, or (bucket, before) of this rank's gradient."""
    clipped: Tensor
    """int64 []: parts of the gradient that were clipped on this rank."""
    parts: int
    """Parts in all: DDP's buckets, or 1; 0 where nothing is clipped."""
    finite: Tensor
    """bool []: whether the averaged gradient is; the same on all ranks."""


def clip_gradients_(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Bounds the norm of all gradients together, over all shards (DTensors), in place.

    Squares are added up in double precision. PyTorch's fp32 norm on a CPU is 1e-3 off for the
    gradient of BERT-base's word embedding, and 1e-2 for 94 million numbers.

    Args:
        parameters: those without a gradient are left out.
        max_norm: infinity only computes the norm.

    Returns:
        The norm before, float32 [].
    """
    lists: defaultdict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for grad in (p.grad for p in parameters if p.grad is not None):
        lists[shard_groups(grad)].append(local(grad))
    total = torch.zeros(())
    for groups, grads in lists.items():
        norm = multi_tensor_l2norm(grads)[0]
        if groups:
            square = norm.square()
            for group in groups:
                dist.all_reduce(square, group=group)
            norm = square.sqrt()
        total = torch.hypot(total, norm)
    if max_norm != math.inf:
        for grads in lists.values():
            # As torch.nn.utils.clip_grads_with_norm_ does it.
            multi_tensor_scale_(grads, (max_norm / (total + 1e-6)).clamp(max=1.0))
    return total


class Clipping:
    """Bounds the gradient as `clip` in the configuration says, and leaves the average in `.grad`.

    One rank has nothing to overlap: its whole gradient is one bucket, so all modes but `none` are
    the same.

    Args:
        config: says how.
        ranks: the processes of the run.
        model: bare, on its device.
        hook: how gradients travel.
        loss_scale: what losses are multiplied by; None for 1. Gradients are divided by it before
            anything else looks at them, so bounds and norms are of the unscaled gradient.
        buckets: of passes that are CUDA graphs, to be averaged without DDP; None: DDP's.
    """

    def __init__(
        self,
        config: ClipConfig,
        ranks: Ranks,
        model: nn.Module,
        hook: CommHook,
        loss_scale: LossScale | None = None,
        buckets: GraphBuckets | None = None,
    ) -> None:
        self._config = config
        self._hook = hook
        self._graph_buckets = buckets
        self._loss_scale = loss_scale
        self._max_norm = config.max_norm
        self._ranks = ranks
        self._model = model
        self._mode = config.mode
        if ranks.world_size == 1 and config.mode != "none":
            self._mode = "after"
        wire = WIRE_DTYPES[config.wire_dtype]
        self._bucket: BucketClip | None = None
        self._before: ClipBefore | None = None
        if ranks.world_size == 1:
            return
        if self._mode == "before":
            self._before = ClipBefore(
                model.parameters(), config.max_norm, wire, allreduce=hook.allreduce
            )
        else:
            self._bucket = self._make_bucket()
        if buckets is not None and self._bucket is not None:
            buckets.attach(self._bucket, hook.allreduce)

    def _make_bucket(self) -> BucketClip | None:
        """What bounds, casts or unscales buckets before they travel; None where nothing has to."""
        # A hook's memory outlives a change of the scale, so what it gets must be unscaled.
        needed = self._loss_scale is not None and bool(self._hook.hook)
        return self._bucket_clip(needed or self._graph_buckets is not None)

    def _bucket_clip(self, needed: bool) -> BucketClip | None:
        config, scale = self._config, self._loss_scale
        wire = WIRE_DTYPES[config.wire_dtype]
        if not (self._mode == "bucket" or wire is not None or needed):
            return None
        return BucketClip(
            config.max_norm if self._mode == "bucket" else math.inf,
            config.policy,
            wire,
            config.error_feedback,
            None if scale is None else scale.value,
        )

    @property
    def in_backward(self) -> bool:
        """Whether DDP averages gradients during the backward pass; if not, `clip` does it."""
        return self._before is None

    def attach(self, replica: nn.Module) -> None:
        """Registers DDP's communication hook if one is needed; before the first backward pass."""
        hook = self._hook
        if self._bucket is not None:
            assert isinstance(replica, DistributedDataParallel)
            if hook.allreduce is not None:
                self._bucket.attach(replica, allreduce=hook.allreduce)
            else:
                self._bucket.attach(replica, hook.hook, hook.state)
        elif hook.hook is not None:
            assert isinstance(replica, DistributedDataParallel)
            replica.register_comm_hook(hook.state, hook.hook)

    def clip(self) -> GradientReport:
        """Makes `.grad` the clipped average, after the backward passes of a step."""
        if self._graph_buckets is not None:
            self._graph_buckets.wait()
        if self._loss_scale is not None and self._bucket is None:
            self._loss_scale.unscale_(self._model.parameters())
        if self._before is not None:
            report = self._before.sync()
        elif self._mode == "bucket" and self._bucket is not None:
            report = self._bucket.report()
        else:
            return self._clip_average()
        return GradientReport(report.norm, report.clipped, len(report.norms), report.finite)

    def _clip_average(self) -> GradientReport:
        bound = self._max_norm if self._mode == "after" else math.inf
        norm = clip_gradients_(self._model.parameters(), bound)
        return GradientReport(
            norm, (norm > bound).long(), int(self._mode == "after"), norm.isfinite()
        )

    def state_dict(self) -> dict[str, Any]:
        """What the next step's clipping depends on, of all ranks, as JSON; all must call it."""
        if self._bucket is None:
            return {}
        state = self._bucket.state_dict()
        ranks, device = self._ranks, self._ranks.device
        count = len(state["squares"])
        squares = torch.zeros(ranks.world_size, count, dtype=torch.float64, device=device)
        squares[ranks.rank] = torch.tensor(state["squares"], dtype=torch.float64)
        return {"sizes": state["sizes"], "squares": ranks.sum(squares).tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state_dict`; after a change of the number of ranks it changes nothing."""
        if self._bucket is None or len(state.get("squares", ())) != self._ranks.world_size:
            return
        squares = state["squares"][self._ranks.rank]
        self._bucket.load_state_dict({"sizes": state["sizes"], "squares": squares})
