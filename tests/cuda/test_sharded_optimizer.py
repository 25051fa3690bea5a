"""ShardedOptimizer on NCCL, with one rank, against the optimizer without shards."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bert_unpad.distributed import BucketClip, ShardedOptimizer
from bert_unpad.optim import FusedAdam, FusedLAMB, FusedStableAdamW, decay_groups
from tests.support.cuda_checks import GPU_ONLY, raise_if_the_host_waits
from tests.support.shard_nets import batch, loss_of, net

pytestmark = GPU_ONLY

KINDS = {
    "adam": (FusedAdam, {"lr": 1e-2}),
    "lamb": (FusedLAMB, {"lr": 1e-2, "max_grad_norm": None}),
    "stable": (FusedStableAdamW, {"lr": 1e-2}),
}
CAP = 0.0004  # MiB: a few parameters in each bucket


@pytest.fixture(scope="module", autouse=True)
def nccl():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    inputs = [batch(0, step).cuda() for step in steps]
    for number, ids in enumerate(inputs):
        # The first pass makes the buckets, the first step the state.
        with raise_if_the_host_waits(number > 1):
            loss_of(model(ids), ids).backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_trains_as_without_shards_and_the_host_never_waits(kind, wire):
    optimizer, options = KINDS[kind]
    ours, theirs = net().cuda(), net().cuda()
    clip = None if wire is None else BucketClip(1e9, wire_dtype=wire)
    sharded = ShardedOptimizer(
        ours, decay_groups(ours, 0.1), optimizer, bucket_cap_mb=CAP, clip=clip, **options
    )
    _train(ours, sharded, range(4))
    plain = optimizer(decay_groups(theirs, 0.1), **options)
    _train(theirs, plain, range(4))
    want = theirs.state_dict()
    close = 1e-6 if wire is None else 1e-2
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, want[name], rtol=close, atol=close)
    state, other = sharded.state_dict()["state"], plain.state_dict()["state"]
    for number, values in other.items():
        assert state[number].keys() == values.keys()
        for name, value in values.items():
            assert state[number][name].device == value.device
            torch.testing.assert_close(state[number][name], value, rtol=close, atol=close)


def test_a_loaded_state_continues_with_the_same_bits():
    models = [net().cuda() for _ in range(2)]
    optimizers = [
        ShardedOptimizer(m, decay_groups(m, 0.1), FusedLAMB, bucket_cap_mb=CAP, lr=1e-2)
        for m in models
    ]
    _train(models[0], optimizers[0], range(2))
    models[1].load_state_dict(models[0].state_dict())
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    for model, optimizer in zip(models, optimizers, strict=True):
        _train(model, optimizer, range(2, 4))
    want = models[0].state_dict()
    assert all(torch.equal(value, want[name]) for name, value in models[1].state_dict().items())
