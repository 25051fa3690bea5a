"""Backward passes and clipping where ranks share more than the optimizer's state out.

`optimizer.shard: overlap` averages gradients in the optimizer (`ShardedOptimizer`), `fsdp` in
FSDP2. Neither needs DDP.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from bert_unpad.distributed import BucketClip, ShardedClip, ShardedOptimizer
from bert_unpad.nn import EncoderForPreTraining, PreTrainingOutput
from bert_unpad.pretrain.gradients.clipping import Clipping, GradientReport

__all__ = ["FsdpClipping", "FsdpReplica", "OverlapClipping", "OverlapReplica", "clipping_kind"]


class OverlapReplica:
    """A model whose gradients a `ShardedOptimizer` averages, with DDP's interface."""

    def __init__(self, model: EncoderForPreTraining, optimizer: ShardedOptimizer) -> None:
        self.optimizer = optimizer
        self._model = model

    def __call__(self, *args: Any) -> PreTrainingOutput:
        return self._model(*args)

    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which backward passes add up gradients on this rank."""
        return self.optimizer.no_sync()


class FsdpReplica:
    """A model under FSDP2, with DDP's interface."""

    def __init__(self, model: FSDPModule) -> None:
        self.model = model

    def __call__(self, *args: Any) -> PreTrainingOutput:
        return self.model(*args)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which backward passes add up whole gradients on this rank."""
        self.model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)


class OverlapClipping(Clipping):
    """Clipping in a `ShardedOptimizer`: of its buckets, or of the average over all shards."""

    def _make_bucket(self) -> BucketClip | None:
        # Gradients go into the buckets as they are, so only there can they be unscaled.
        return self._bucket_clip(needed=self._loss_scale is not None)

    def attach(self, replica: OverlapReplica) -> None:
        """Hands the bounds to the optimizer."""
        self._optimizer = replica.optimizer
        bounds = {"bucket": None, "after": self._max_norm, "none": float("inf")}
        self._optimizer.set_clipping(self._bucket, bounds[self._mode])

    def clip(self) -> GradientReport:
        """Waits for the clipped average of this rank's parts."""
        report = self._optimizer.reduce_gradients()
        parts = 0 if self._mode == "none" else len(report.norms)
        return GradientReport(report.norm, report.clipped, parts, report.finite)


class FsdpClipping(Clipping):
    """Clipping under FSDP2: of each group before its reduce-scatter, or of the average."""

    def _make_bucket(self) -> BucketClip | None:
        return None

    def attach(self, replica: FsdpReplica) -> None:
        """Replaces the reduce-scatters by ones that clip first, if that is asked for."""
        self._groups: ShardedClip | None = None
        if self._mode == "bucket":
            scale = None if self._loss_scale is None else self._loss_scale.value
            self._groups = ShardedClip(self._max_norm, "equal", scale).attach(replica.model)

    def clip(self) -> GradientReport:
        """Makes `.grad` this rank's shards of the clipped average."""
        if self._groups is None:
            return super().clip()
        report = self._groups.report()
        return GradientReport(report.norm, report.clipped, len(report.norms), report.finite)


def clipping_kind(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> type[Clipping]:
    """The kind of clipping that goes with how the ranks share an update."""
    if isinstance(optimizer, ShardedOptimizer):
        return OverlapClipping
    return FsdpClipping if isinstance(model, FSDPModule) else Clipping
