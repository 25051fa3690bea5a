"""The model in DDP, as the backward passes of several ranks call it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bert_unpad.batch import PackedInputs, VarlenBatch
from bert_unpad.nn import EncoderForPreTraining
from bert_unpad.pretrain.config import ConfigError
from bert_unpad.pretrain.gradients.clipping import Clipping
from bert_unpad.pretrain.gradients.comm_hook import CommHook
from bert_unpad.pretrain.gradients.comm_hooks import SETTLING_PASSES
from bert_unpad.pretrain.ranks import Ranks


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
) -> DistributedDataParallel:
    """The model in DDP with its hook attached, ready to train.

    DDP rebuilds its buckets after the first backward pass. That changes the order in which the
    gradients of more than two ranks are added, and the bounds of `BucketClip`. So empty passes run
    before training: the first makes DDP rebuild, the second shows the new buckets to what clips
    them. A resumed run then adds in the same order as one that was never interrupted.

    Raises:
        ConfigError: see `wrap_in_ddp`.
    """
    replica = wrap_in_ddp(model, ranks, hook, bucket_mb, leaves_out, group)
    clipping.attach(replica)
    make_empty_passes(replica, model, ranks.device)
    return replica


def make_empty_passes(
    replica: nn.Module,
    model: EncoderForPreTraining,
    device: torch.device,
    after_pass: Callable[[], None] = lambda: None,
) -> None:
    """Runs passes over an empty batch, whose gradients are zero, until buckets no longer change.

    Args:
        replica: what passes call.
        model: whose gradients are dropped.
        device: of the model.
        after_pass: called after each pass.
    """
    empty = PackedInputs.build(VarlenBatch.from_lengths([]), torch.empty(0, dtype=torch.int64))
    empty = empty.to(device)
    for _ in range(SETTLING_PASSES):
        outputs = replica(empty)
        (outputs[0] + outputs[2]).backward()
        after_pass()
        model.zero_grad()
