"""The fused optimizers on parameters that are sharded or whose states are, and with a scaler."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from bert_unpad.nn.stacked_linear import StackedLinear
from bert_unpad.optim import FusedAdam, FusedLAMB, FusedStableAdamW, decay_groups
from tests.support.processes import run_ranks
from tests.support.seeds import derived

OPTIMIZERS = {
    "adam": (FusedAdam, {"lr": 1e-2, "weight_decay": 0.1}),
    "adam, clipped": (FusedAdam, {"lr": 1e-2, "max_grad_norm": 0.1}),
    "lamb": (FusedLAMB, {"lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.1}),
    "lans": (FusedLAMB, {"lr": 1e-2, "weight_decay": 0.1, "nesterov": True}),
    "stable": (FusedStableAdamW, {"lr": 1e-2, "weight_decay": 0.1}),
}
STEPS = 4


def net() -> nn.Module:
    torch.manual_seed(derived(0))
    # The sizes do not divide evenly among two or three ranks.
    return nn.Sequential(StackedLinear(7, (6, 1, 6)), nn.Tanh(), nn.Linear(13, 5, bias=False))


def groups(model: nn.Module) -> list[dict]:
    return decay_groups(model, 0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """All ranks see the same examples, so that their average is what one process computes."""
    generator = torch.Generator().manual_seed(derived(1))
    for _ in range(STEPS):
        x = torch.randn(6, 7, generator=generator)
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()


def assert_trained_alike(parameters, plain: nn.Module) -> None:
    for got, want in zip(parameters, plain.parameters(), strict=True):
        whole = got.full_tensor() if isinstance(got, DTensor) else got
        torch.testing.assert_close(whole.detach(), want.detach(), rtol=1e-5, atol=1e-6)


def shard(rank: int, world_size: int, name: str) -> None:
    optimizer, options = OPTIMIZERS[name]
    plain = net()
    model = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    train(model, optimizer(groups(model), **options))
    train(plain, optimizer(groups(plain), **options))
    assert_trained_alike(model.parameters(), plain)


def replicate(rank: int, world_size: int, name: str) -> None:
    optimizer, options = OPTIMIZERS[name]
    plain = net()
    model = DistributedDataParallel(copy.deepcopy(plain))
    if "max_grad_norm" not in options:
        # Each rank updates some of the parameters, so it does not see the whole gradient.
        zero = ZeroRedundancyOptimizer(groups(model), optimizer, **options)
        train(model, zero)
    else:
        train(model, optimizer(groups(model), **options))
    train(plain, optimizer(groups(plain), **options))
    assert_trained_alike(model.parameters(), plain)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sharded_parameters_are_updated_as_whole_ones(name):
    run_ranks(shard, 2, name)


@pytest.mark.parametrize("name", ["lamb", "stable"])
def test_sharded_over_three_ranks(name):
    run_ranks(shard, 3, name)


@pytest.mark.parametrize("name", ["adam", "lamb"])
def test_replicas_stay_alike(name):
    run_ranks(replicate, 2, name)


@pytest.mark.parametrize("name", ["adam", "lamb", "stable"])
def test_a_scaler_scales_and_skips(name):
    optimizer, options = OPTIMIZERS[name]
    plain, scaled = net(), net()
    train(plain, optimizer(groups(plain), **options))
    ours = optimizer(groups(scaled), **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    generator = torch.Generator().manual_seed(derived(1))
    for step in range(STEPS + 1):
        ours.zero_grad()
        if step == 2:  # one overflow in between
            loss = scaled(torch.ones(1, 7)).sum() * torch.inf
            before = [p.detach().clone() for p in scaled.parameters()]
        else:
            loss = scaled(torch.randn(6, 7, generator=generator)).square().sum()
        scaler.scale(loss).backward()
        scaler.step(ours)
        scaler.update()
        if step == 2:
            assert all(torch.equal(a, b) for a, b in zip(before, scaled.parameters(), strict=True))
            assert scaler.get_scale() == 2.0**9
    assert_trained_alike(scaled.parameters(), plain)
