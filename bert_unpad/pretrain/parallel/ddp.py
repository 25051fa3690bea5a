"""DDP averages gradients: each rank makes the whole update, or a part of it (ZeRO, stage 1).

`clip.mode` says where clipping stands: `bucket` and `before` bound what each rank contributes,
`after` bounds the average. Whatever the mode, an average that is not finite is the same on all
ranks, so all of them leave out that update without asking each other, on the device.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bert_unpad.distributed import BucketClip, ClipBefore
from bert_unpad.optim.base import FusedOptimizer
from bert_unpad.pretrain.config import ConfigError
from bert_unpad.pretrain.gradients.clipping import GradientReport, make_bucket_clip, wire_dtype
from bert_unpad.pretrain.gradients.comm_hook import CommHook
from bert_unpad.pretrain.node_groups import common_node_size, node_group
from bert_unpad.pretrain.parallel.way import Way, make_empty_passes
from bert_unpad.pretrain.ranks import Ranks
from bert_unpad.pretrain.run import Run


def wrap_in_ddp(
    model: nn.Module,
    ranks: Ranks,
    hook: CommHook,
    bucket: BucketClip | None = None,
    bucket_mb: float | None = None,
    leaves_out: bool = False,
    group: dist.ProcessGroup | None = None,
) -> DistributedDataParallel:
    """The model in DDP, with buckets as the comm hook needs them.

    Args:
        model: on its device.
        ranks: the processes of the run.
        hook: how gradients travel.
        bucket: what bounds or casts buckets before they do; None: nothing.
        bucket_mb: greatest size of a bucket in MiB; None leaves that to DDP.
        leaves_out: whether updates may leave layers out. DDP then looks for parameters that are not
            part of a loss, and averages their buckets all the same.
        group: the ranks that average; None for all.

    Raises:
        ConfigError: a bound on buckets where all gradients must be in one.
    """
    if hook.one_bucket:
        if bucket_mb is not None:
            raise ConfigError(
                "comm.bucket_mb",
                "expected null on CPUs with comm.hook power_sgd, which then has one bucket, got "
                f"{bucket_mb}",
            )
        # More than all gradients take: 8 bytes for each.
        bucket_mb = 1 + sum(p.numel() for p in model.parameters()) // 2**17
    replica = DistributedDataParallel(
        model,
        device_ids=[ranks.device] if ranks.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        bucket_cap_mb=bucket_mb,
        find_unused_parameters=leaves_out,
        process_group=group,
    )
    if bucket is None:
        if hook.hook is not None:
            replica.register_comm_hook(hook.state, hook.hook)
    elif hook.allreduce is not None:
        bucket.attach(replica, allreduce=hook.allreduce)
    else:
        bucket.attach(replica, hook.hook, hook.state)
    return replica


class Ddp(Way):
    """Each rank keeps everything and makes the whole update."""

    _before: ClipBefore | None

    def _wrap(self, leaves_out: bool) -> nn.Module:
        """The model in DDP with its hook attached, ready to train.

        DDP rebuilds its buckets after the first backward pass. That changes the order in which the
        gradients of more than two ranks are added, and the bounds of `BucketClip`. So empty passes
        run before training: the first makes DDP rebuild, the second shows the new buckets to what
        clips them. A resumed run then adds in the same order as one that was never interrupted.

        Raises:
            ConfigError: see `wrap_in_ddp`.
        """
        run, hook = self.run, self._hook
        # A hook's memory outlives a change of the scale, so what it gets must be unscaled.
        self._make_clipping(self.loss_scale is not None and bool(hook.hook))
        bucket_mb = run.comm.bucket_mb
        replica = wrap_in_ddp(run.model, run.ranks, hook, self._bucket, bucket_mb, leaves_out)
        make_empty_passes(replica, run.model, run.device)
        return replica

    def _make_clipping(self, needed: bool) -> None:
        """Makes what clips gradients before they are averaged; see `make_bucket_clip`."""
        clip, self._before = self.run.clip, None
        if self._mode == "before":
            self._before = ClipBefore(
                self.run.model.parameters(),
                clip.max_norm,
                wire_dtype(clip),
                allreduce=self._hook.allreduce,
            )
        else:
            self._bucket = make_bucket_clip(clip, self.loss_scale, needed)

    def _pass(self, last: bool) -> AbstractContextManager[None]:
        if last and self._before is None:
            return nullcontext()
        assert isinstance(self._replica, DistributedDataParallel)
        return self._replica.no_sync()

    def _clip(self) -> GradientReport:
        if self._before is not None:
            if self.loss_scale is not None:
                self.loss_scale.unscale_(self.run.model.parameters())
            return GradientReport.of(self._before.sync())
        if self._mode == "bucket" and self._bucket is not None:
            return GradientReport.of(self._bucket.report())
        return super()._clip()


class Sharded(Ddp):
    """Ranks keep the state of some parameters each, update these, and send them to the others.

    Rajbhandari et al., "ZeRO" (2020, arXiv:1910.02054), stage 1.
    """

    shares_state = True

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._group = self._ranks_that_share()

    def _ranks_that_share(self) -> dist.ProcessGroup | None:
        """A group with this rank; None where each keeps all of the state."""
        return dist.group.WORLD

    def _build(
        self, kind: type[torch.optim.Optimizer], groups: list[dict[str, Any]], **options: Any
    ) -> torch.optim.Optimizer:
        if self._group is None:
            return super()._build(kind, groups, **options)
        from torch.distributed.optim import ZeroRedundancyOptimizer  # takes 0.6 s

        made = ZeroRedundancyOptimizer(groups, kind, process_group=self._group, **options)
        if isinstance(made.optim, FusedOptimizer):
            made.optim.norm_group = self._group  # its own max_grad_norm bounds all parameters'
        return made


class NodeSharded(Sharded):
    """The ranks of a machine keep the state of some parameters each."""

    def _ranks_that_share(self) -> dist.ProcessGroup | None:
        ranks = self.run.ranks
        size = common_node_size(ranks, "optimizer.shard", "node", "world or none")
        return None if size == 1 else node_group(ranks, size)
