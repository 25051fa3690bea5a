"""Updates of which each rank makes a part, exchanged beside the passes; without DDP."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bert_unpad.distributed import BucketClip, ShardedOptimizer
from bert_unpad.pretrain.gradients.clipping import Clipping, GradientReport
from bert_unpad.pretrain.gradients.comm_hook import CommHook
from bert_unpad.pretrain.gradients.replica import make_empty_passes
from bert_unpad.pretrain.parallel.way import Groups, Kind, Way
from bert_unpad.pretrain.run import Run


class _Clipping(Clipping):
    """Clipping in a `ShardedOptimizer`: of its buckets, or of the average over all shards."""

    def _make_bucket(self) -> BucketClip | None:
        # Gradients go into the buckets as they are, so only there can they be unscaled.
        return self._bucket_clip(needed=self._loss_scale is not None)

    def attach_to(self, optimizer: ShardedOptimizer) -> None:
        """Hands the bounds to the optimizer, in place of `attach`."""
        self._optimizer = optimizer
        bounds = {"bucket": None, "after": self._max_norm, "none": float("inf")}
        optimizer.set_clipping(self._bucket, bounds[self._mode])

    def clip(self) -> GradientReport:
        """Waits for the clipped average of this rank's parts."""
        report = self._optimizer.reduce_gradients()
        parts = 0 if self._mode == "none" else len(report.norms)
        return GradientReport(report.norm, report.clipped, parts, report.finite)


class Overlap(Way):
    """A `ShardedOptimizer` averages gradients, and sends weights, beside the passes."""

    waits_in_passes = shares_state = cuts_parameters = True
    clipping = _Clipping

    def make_optimizer(
        self, kind: Kind, model: nn.Module, groups: Groups, bucket_mb: float | None, **options: Any
    ) -> torch.optim.Optimizer:
        self._optimizer = ShardedOptimizer(
            model, groups, kind, dist.group.WORLD, bucket_cap_mb=bucket_mb, **options
        )
        return self._optimizer

    def wrap(self, run: Run, clipping: Clipping, hook: CommHook, leaves_out: bool) -> nn.Module:
        optimizer = self._optimizer

        def after_pass() -> None:
            optimizer.reduce_gradients()
            optimizer.zero_grad()

        assert isinstance(clipping, _Clipping)
        clipping.attach_to(optimizer)
        make_empty_passes(run.model, run.model, run.device, after_pass)  # which make its buckets
        return run.model

    def no_sync(self, replica: nn.Module) -> AbstractContextManager[None]:
        return self._optimizer.no_sync()
