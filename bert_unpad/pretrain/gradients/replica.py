"""The model as the backward passes call it: compiled if asked for, in DDP with several ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from bert_unpad.batch import PackedInputs, VarlenBatch
from bert_unpad.distributed import ShardedOptimizer
from bert_unpad.nn import EncoderForPreTraining
from bert_unpad.pretrain.config import ConfigError
from bert_unpad.pretrain.gradients.clipping import Clipping
from bert_unpad.pretrain.gradients.comm_hook import CommHook
from bert_unpad.pretrain.gradients.comm_hooks import SETTLING_PASSES
from bert_unpad.pretrain.gradients.sharded import FsdpReplica, OverlapReplica
from bert_unpad.pretrain.ranks import Ranks

Replica = nn.Module | OverlapReplica | FsdpReplica


def wrap_in_ddp(
    model: nn.Module,
    ranks: Ranks,
    hook: CommHook,
    bucket_mb: float | None,
    leaves_out: bool,
    group: dist.ProcessGroup | None,
) -> DistributedDataParallel:
    """The model in DDP, with buckets as the communication hook needs them.

    Args:
        model: on its device.
        ranks: the processes of the run.
        hook: how gradients travel.
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
    return DistributedDataParallel(
        model,
        device_ids=[ranks.device] if ranks.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        bucket_cap_mb=bucket_mb,
        find_unused_parameters=leaves_out,
        process_group=group,
    )


def replicate(
    model: EncoderForPreTraining,
    ranks: Ranks,
    clipping: Clipping,
    hook: CommHook,
    bucket_mb: float | None = None,
    leaves_out: bool = False,
    group: dist.ProcessGroup | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Replica:
    """The model in DDP with its hook attached, ready to train; one rank gets the model itself.

    An optimizer that averages gradients itself, or a model under FSDP2, needs no DDP.

    DDP rebuilds its buckets after the first backward pass. That changes the order in which the
    gradients of more than two ranks are added, and the bounds of `BucketClip`. So two passes over
    an empty batch, whose gradients are zero, run before training: the first makes DDP rebuild, the
    second shows the new buckets to what clips them. A resumed run then adds in the same order as
    one that was never interrupted. `ShardedOptimizer` likewise makes its buckets in the first.

    Raises:
        ConfigError: see `wrap_in_ddp`.
    """
    if ranks.world_size == 1:
        return model
    replica: Replica
    if isinstance(model, FSDPModule):
        replica = FsdpReplica(model)
        clipping.attach(replica)
        return replica
    if isinstance(optimizer, ShardedOptimizer):
        replica = OverlapReplica(model, optimizer)
    else:
        replica = wrap_in_ddp(model, ranks, hook, bucket_mb, leaves_out, group)
    clipping.attach(replica)
    empty = PackedInputs.build(VarlenBatch.from_lengths([]), torch.empty(0, dtype=torch.int64))
    empty = empty.to(ranks.device)
    for _ in range(SETTLING_PASSES):
        outputs = replica(empty)
        (outputs[0] + outputs[2]).backward()
        if isinstance(replica, OverlapReplica):
            replica.optimizer.reduce_gradients()
            replica.optimizer.zero_grad()
        model.zero_grad()
    return replica
