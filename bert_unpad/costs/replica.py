"""A DDP replica that exchanges its gradients as a candidate says, with what the trainer uses."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from bert_unpad.costs.sync import POWER_SGD_RANK
from bert_unpad.distributed import BucketClip

__all__ = ["SETTLING_PASSES", "make_replica"]

SETTLING_PASSES = 4
"""Passes after which a replica exchanges as it will go on to: DDP lays its buckets anew after the
first, and PowerSGD compresses from the third on."""


def make_replica(
    model: nn.Module, compression: str, group: Any = None, bucket_mb: float | None = None
) -> DistributedDataParallel:
    """Wraps `model`; `compression` is none, bf16 or power_sgd.

    Args:
        model: on its device; not wrapped before.
        compression: how gradients travel.
        group: of the ranks that average; by default all.
        bucket_mb: limit of a bucket in MiB; by default PyTorch's.
    """
    device = next(model.parameters()).device
    if compression == "power_sgd" and device.type == "cpu":  # as the trainer: see its exchange.py
        bucket_mb = 1 + sum(p.numel() for p in model.parameters()) // 2**17
    replica = DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        process_group=group,
        gradient_as_bucket_view=True,
        bucket_cap_mb=bucket_mb,
    )
    if compression == "bf16":
        BucketClip(math.inf, wire_dtype=torch.bfloat16).attach(replica)
    elif compression == "power_sgd":
        state = PowerSGDState(
            process_group=group, matrix_approximation_rank=POWER_SGD_RANK, start_powerSGD_iter=2
        )
        replica.register_comm_hook(state, powerSGD_hook)
    return replica
