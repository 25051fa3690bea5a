"""Clipping a step's gradient: the average, or buckets as `clip` in the configuration says."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bert_unpad.distributed import BucketClip
from bert_unpad.distributed.bucket_clip import ClipReport
from bert_unpad.ops import multi_tensor_l2norm, multi_tensor_scale_
from bert_unpad.optim.parameter_lists import local, shard_groups
from bert_unpad.pretrain.config import ClipConfig
from bert_unpad.pretrain.gradients.loss_scale import LossScale


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

    @classmethod
    def of(cls, report: ClipReport, clips: bool = True) -> GradientReport:
        """What has clipped buckets, or the average, reports; `clips`: whether it has any bound."""
        parts = len(report.norms) if clips else 0
        return cls(report.norm, report.clipped, parts, report.finite)


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


def wire_dtype(config: ClipConfig) -> torch.dtype | None:
    """What gradients are cast to before they travel; None: they are not."""
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[config.wire_dtype]


def make_bucket_clip(
    config: ClipConfig, loss_scale: LossScale | None, needed: bool
) -> BucketClip | None:
    """What bounds, casts and unscales buckets before they travel; None where nothing has to.

    Args:
        config: says how.
        loss_scale: what losses are multiplied by; None for 1. Buckets are divided by it before
            anything else looks at them, so bounds and norms are of the unscaled gradient.
        needed: whether there must be one, even without a bound and a cast.
    """
    bounds = config.mode == "bucket"
    if not (bounds or needed or config.wire_dtype != "fp32"):
        return None
    return BucketClip(
        config.max_norm if bounds else math.inf,
        config.policy,
        wire_dtype(config),
        config.error_feedback,
        None if loss_scale is None else loss_scale.value,
    )
