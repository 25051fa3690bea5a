"""Clipping before the average under FSDP2, against the formula on the whole gradient."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bert_unpad.distributed import ShardedClip
from tests.support.processes import run_ranks
from tests.support.seeds import derived

C = 0.5


def _net() -> nn.Module:
    """Sizes that two ranks cannot split evenly; the last layer belongs to the root's group."""
    torch.manual_seed(derived(2))
    return nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 5), nn.Linear(5, 3))


def _clipped(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    for policy, scale in (("equal", None), ("numel", None), ("equal", torch.tensor(64.0))):
        bare, model = _net(), _net()
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        clip = ShardedClip(C, policy, scale).attach(model)
        groups = [("3.weight", "3.bias"), ("0.weight", "0.bias"), ("2.weight", "2.bias")]
        total = sum(p.numel() for p in bare.parameters())
        for step in range(3):
            generator = torch.Generator().manual_seed(derived(10 * rank + step))
            x = torch.randn(4, 7, generator=generator) * (1 + rank)
            local = copy.deepcopy(bare)
            local(x).square().sum().backward()
            loss = model(x).square().sum()
            if step == 2 and rank == 1:
                loss = loss * math.inf
            (loss if scale is None else loss * scale).backward()
            report = clip.report()
            assert bool(report.finite) == (step != 2)
            if step == 2:
                break
            assert int(report.clipped) > 0
            squares = 0.0
            for names, norm, bound in zip(groups, report.norms, report.bounds, strict=True):
                grads = [local.get_parameter(name).grad.double() for name in names]
                length = torch.cat([g.flatten() for g in grads]).norm()
                size = sum(g.numel() for g in grads)
                share = 1 / 3 if policy == "equal" else size / total
                assert float(bound) == pytest.approx(C * math.sqrt(share), rel=1e-6)
                assert float(norm) == pytest.approx(float(length), rel=1e-5)
                for name, g in zip(names, grads, strict=True):
                    want = g * min(1.0, float(bound / length)) / world_size
                    dist.all_reduce(want)
                    got = model.get_parameter(name).grad.full_tensor().double()
                    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-7)
                    squares += float(got.square().sum())
            assert 0 < math.sqrt(squares) <= C * 1.0001
            model.zero_grad()


def test_groups_are_clipped_before_they_are_averaged():
    run_ranks(_clipped, 2)


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match="policy: expected equal or numel under FSDP"):
        ShardedClip(1.0, "adaptive")
    with pytest.raises(ValueError, match="max_norm: expected a number above 0"):
        ShardedClip(0.0)
    with pytest.raises(ValueError, match="model: expected parameters that fully_shard manages"):
        ShardedClip(1.0).attach(nn.Linear(2, 2))
