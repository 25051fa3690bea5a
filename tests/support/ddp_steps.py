"""Some steps of DDP, clipping, comm hook and optimizer on a model of two layers; one is NaN."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bert_unpad.optim import FusedAdam
from bert_unpad.pretrain.config import ClipConfig, CommConfig, PretrainConfig
from bert_unpad.pretrain.gradients.comm_hooks import SETTLING_PASSES
from bert_unpad.pretrain.parallel import ddp
from bert_unpad.pretrain.ranks import Ranks
from bert_unpad.pretrain.run import Run
from tests.support.seeds import derived

__all__ = ["ddp_steps"]


def _adam(parameters: Iterable[nn.Parameter]) -> FusedAdam:
    return FusedAdam(parameters, lr=1e-2)


def _empty_passes(replica: nn.Module, model: nn.Module, device: torch.device) -> None:
    for _ in range(SETTLING_PASSES):
        (replica(torch.zeros(1, 24)) * 0).sum().backward()
        model.zero_grad()


def ddp_steps(
    rank: int,
    world_size: int,
    comm: CommConfig,
    mode: str,
    *,
    steps: int,
    nan_step: int,
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = _adam,
) -> dict[str, Any]:
    """What one rank has seen of a training run.

    Args:
        rank: this one; rank 1 has a NaN in its inputs at `nan_step` (counted from 0).
        world_size: number of ranks.
        comm: decides the comm hook.
        mode: `clip.mode`.
        steps: number of them.
        nan_step: which of them must be left out.
        make_optimizer: gets the parameters.

    Returns:
        `finite`: whether each step was made; `weights`: all of them after each step; `end`:
        weights and optimizer state after `synchronise`; `local`: numbers of the hook's
        `local_state`.
    """
    torch.manual_seed(derived(0))
    model = nn.Sequential(nn.Linear(24, 32), nn.Linear(32, 24))
    ranks = Ranks(rank, world_size, torch.device("cpu"), dist.group.WORLD)
    # Where there may be several buckets, this model has them.
    size = None if comm.hook == "power_sgd" else 0.002  # MiB
    clip, comm = ClipConfig(max_norm=0.5, mode=mode), replace(comm, bucket_mb=size)
    way = ddp.Ddp(Run(PretrainConfig(clip=clip, comm=comm), ranks, model))
    way.optimizer = optimizer = make_optimizer(model.parameters())
    ddp.make_empty_passes = _empty_passes
    way.begin()
    replica, hook = way._replica, way._hook
    draw = torch.Generator().manual_seed(derived(rank))
    finite, weights = [], []
    for step in range(steps):
        x = torch.randn(16, 24, generator=draw)
        if (rank, step) == (1, nan_step):
            x[3, 5] = math.nan
        (replica(x) - x.roll(1, 1)).square().mean().backward()
        every_finite = way.finish().finite
        way.step(every_finite, optimizer.param_groups[0]["lr"])
        finite.append(bool(every_finite))
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]).clone())
    way.synchronise(with_state=True)
    states = [v for p in model.parameters() for _, v in sorted(optimizer.state[p].items())]
    end = [t.clone() for t in (*(p.detach() for p in model.parameters()), *states)]
    kept = [t for t in tree_leaves(hook.local_state()) if isinstance(t, Tensor)]
    local = [t.clone() for t in kept if t.is_floating_point()]
    return {"finite": finite, "weights": weights, "end": end, "local": local}
