"""A model in DDP that syncs gradients by one of `HOOK_COMPRESSIONS`, as the trainer makes it."""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bert_unpad.nn import EncoderForPreTraining
from bert_unpad.pretrain.config import ClipConfig, CommConfig
from bert_unpad.pretrain.gradients.clipping import make_bucket_clip
from bert_unpad.pretrain.gradients.comm_hooks import build_comm_hook
from bert_unpad.pretrain.parallel.ddp import wrap_in_ddp
from bert_unpad.pretrain.parallel.way import make_empty_passes
from bert_unpad.pretrain.ranks import Ranks


def make_replica(
    model: EncoderForPreTraining,
    compression: str,
    group: dist.ProcessGroup | None = None,
    bucket_mb: float | None = None,
    node_size: int | None = None,
) -> DistributedDataParallel:
    """Wraps a model, whose passes then sync gradients as they will go on to.

    Args:
        model: on its device; not wrapped before.
        compression: how gradients travel.
        group: of the ranks that average; by default all.
        bucket_mb: limit of a bucket in MiB, where the trainer leaves that open; by default DDP's.
        node_size: ranks of a node, neighbours in rank, within which gradients that are not
            compressed are averaged first; None: over all ranks at once.
    """
    # The trainer does not wrap the model of a single rank; a group of one rank is wrapped here.
    ranks = Ranks(
        rank=dist.get_rank(),
        world_size=max(dist.get_world_size(), 2),
        device=next(model.parameters()).device,
        checkpoint_group=None,
        node_size=node_size or 1,
        local_rank=dist.get_rank() % (node_size or 1),
    )
    if compression == "power_sgd":
        comm = CommConfig(hook="power_sgd", start=0)
    else:
        comm = CommConfig(hook="allreduce" if node_size is None else "hierarchical", start=0)
    hook = build_comm_hook(comm, ranks)
    if group is not None and compression == "power_sgd":
        hook.state.process_group = group
    clip = ClipConfig(mode="none", wire_dtype="bf16" if compression == "bf16" else "fp32")
    bucket = make_bucket_clip(clip, loss_scale=None, needed=False)
    limit = None if hook.one_bucket else bucket_mb
    replica = wrap_in_ddp(model, ranks, hook, bucket, limit, group=group)
    make_empty_passes(replica, model, ranks.device)
    return replica
