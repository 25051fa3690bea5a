"""Updates of which each rank makes a part, exchanged beside the passes; without DDP."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bert_unpad.distributed import ShardedOptimizer
from bert_unpad.pretrain.gradients.clipping import GradientReport, make_bucket_clip
from bert_unpad.pretrain.parallel.way import Way, make_empty_passes


class Overlap(Way):
    """A `ShardedOptimizer` averages gradients, and sends weights, beside the passes.

    It clips its buckets, or the average over all shards.
    """

    waits_in_passes = shares_state = cuts_parameters = True
    optimizer: ShardedOptimizer

    def _build(
        self, kind: type[torch.optim.Optimizer], groups: list[dict[str, Any]], **options: Any
    ) -> torch.optim.Optimizer:
        size = self.run.config.comm.bucket_mb
        return ShardedOptimizer(
            self.run.model, groups, kind, dist.group.WORLD, bucket_cap_mb=size, **options
        )

    def _wrap(self, leaves_out: bool) -> nn.Module:
        model, clip = self.run.model, self.run.config.clip
        # Gradients go into the buckets as they are, so only there can they be unscaled.
        self._bucket = make_bucket_clip(clip, self.loss_scale, self.loss_scale is not None)
        bounds = {"bucket": None, "after": clip.max_norm, "none": float("inf")}
        self.optimizer.set_clipping(self._bucket, bounds[self._mode])

        def after_pass() -> None:
            self.optimizer.reduce_gradients()
            self.optimizer.zero_grad()

        make_empty_passes(model, model, self.run.device, after_pass)  # which make its buckets
        return model

    def _pass(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self.optimizer.no_sync()

    def _clip(self) -> GradientReport:
        """Waits for the clipped average of this rank's parts."""
        return GradientReport.of(self.optimizer.reduce_gradients(), clips=self._mode != "none")
