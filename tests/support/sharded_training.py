"""Training with `ShardedOptimizer`, and with the optimizers that it shards."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bert_unpad.distributed import ShardedOptimizer
from bert_unpad.optim import FusedAdam, FusedLAMB, FusedStableAdamW, decay_groups
from tests.support.shard_nets import batch, loss_of

__all__ = [
    "CAP",
    "KINDS",
    "STEPS",
    "assert_close",
    "assert_same_on_all_ranks",
    "plain",
    "sharded",
    "train",
    "weights",
]

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-2}),
    "fused": (FusedAdam, {"lr": 1e-2}),
    "fused, clipped": (FusedAdam, {"lr": 1e-2, "max_grad_norm": 0.5}),
    "lamb": (FusedLAMB, {"lr": 1e-2}),
    "lans": (FusedLAMB, {"lr": 1e-2, "nesterov": True}),
    "stable": (FusedStableAdamW, {"lr": 1e-2}),
    "sgd": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
}
CAP = 0.0004  # MiB: a few parameters in each bucket
STEPS = 4


def sharded(model: nn.Module, kind: str = "fused", **more: Any) -> ShardedOptimizer:
    optimizer, options = KINDS[kind]
    return ShardedOptimizer(
        model, decay_groups(model, 0.1), optimizer, bucket_cap_mb=CAP, **options, **more
    )


def plain(model: nn.Module, kind: str = "fused") -> torch.optim.Optimizer:
    optimizer, options = KINDS[kind]
    return optimizer(decay_groups(model, 0.1), **options)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    steps: range = range(STEPS),
    parts: int = 1,
    uses: Callable[[int, int], bool] = lambda rank, step: True,
    max_norm: float | None = None,
) -> None:
    """Trains a DDP model or one whose optimizer is sharded."""
    owner = optimizer if isinstance(optimizer, ShardedOptimizer) else model
    for step in steps:
        for part in range(parts):
            ids = batch(rank, step, part)
            with nullcontext() if part == parts - 1 else owner.no_sync():
                loss_of(model(ids, uses(rank, step)), ids).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], atol: float = 2e-6) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=atol, msg=name)


def assert_same_on_all_ranks(model: nn.Module) -> None:
    for tensor in model.state_dict().values():
        others = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(others, tensor.contiguous())
        assert all(torch.equal(tensor, other) for other in others)
