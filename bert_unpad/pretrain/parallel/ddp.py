"""DDP averages gradients: each rank makes the whole update, or a part of it (ZeRO, stage 1)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bert_unpad.pretrain.gradients.clipping import Clipping
from bert_unpad.pretrain.gradients.comm_hook import CommHook
from bert_unpad.pretrain.gradients.replica import replicate
from bert_unpad.pretrain.node_groups import common_node_size, node_group
from bert_unpad.pretrain.parallel.way import Groups, Kind, Way
from bert_unpad.pretrain.ranks import Ranks
from bert_unpad.pretrain.run import Run


class Ddp(Way):
    """Each rank keeps everything and makes the whole update."""

    def wrap(self, run: Run, clipping: Clipping, hook: CommHook, leaves_out: bool) -> nn.Module:
        bucket_mb = run.config.comm.bucket_mb
        return replicate(run.model, run.ranks, clipping, hook, bucket_mb, leaves_out)

    def no_sync(self, replica: nn.Module) -> AbstractContextManager[None]:
        assert isinstance(replica, DistributedDataParallel)
        return replica.no_sync()


class Sharded(Ddp):
    """Ranks keep the state of some parameters each, update these, and send them to the others.

    Rajbhandari et al., "ZeRO" (2020, arXiv:1910.02054), stage 1.
    """

    shares_state = True

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks)
        self._group = self._ranks_that_share()

    def _ranks_that_share(self) -> dist.ProcessGroup | None:
        """A group with this rank; None where each keeps all of the state."""
        return dist.group.WORLD

    def make_optimizer(
        self, kind: Kind, model: nn.Module, groups: Groups, bucket_mb: float | None, **options: Any
    ) -> torch.optim.Optimizer:
        if self._group is None:
            return super().make_optimizer(kind, model, groups, bucket_mb, **options)
        from torch.distributed.optim import ZeroRedundancyOptimizer  # takes 0.6 s

        return ZeroRedundancyOptimizer(groups, kind, process_group=self._group, **options)


class NodeSharded(Sharded):
    """The ranks of a machine keep the state of some parameters each."""

    def _ranks_that_share(self) -> dist.ProcessGroup | None:
        size = common_node_size(self.ranks, "optimizer.shard", "node", "world or none")
        return None if size == 1 else node_group(self.ranks, size)
