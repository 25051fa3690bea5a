"""Layer-wise and sparse averages on NCCL, with one rank, against a simulation on the CPU."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bert_unpad.experimental import (
    GradientFlow,
    PartialSync,
    gradient_flow_hook,
    partial_sync_hook,
)
from bert_unpad.experimental.dream_ddp import PROFILED
from tests.support.cuda_checks import GPU_ONLY, raise_if_the_host_waits
from tests.support.simulated_ranks import (
    Simulated,
    gradient_flow,
    loss,
    net,
    partial_sync,
    weights,
)

pytestmark = GPU_ONLY

STEPS, START = 16, 2


@pytest.fixture(scope="module", autouse=True)
def nccl():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, betas=(0.9, 0.99))


def _train(state: PartialSync | GradientFlow, finish: bool) -> tuple[list, list[list[str]]]:
    """The weights after each step, and the names of the parameters of each bucket."""
    model = net().cuda()
    names = {id(p): name for name, p in model.named_parameters()}
    buckets: list[list[str]] = []
    sync_bucket = state._sync_bucket

    def recording(bucket):
        if bucket.index() == 0:
            buckets.clear()
        buckets.append([names[id(p)] for p in bucket.parameters()])
        return sync_bucket(bucket)

    state._sync_bucket = recording
    replica = DistributedDataParallel(model, bucket_cap_mb=0.0002, gradient_as_bucket_view=True)
    hook = partial_sync_hook if finish else gradient_flow_hook
    replica.register_comm_hook(state, hook)
    for _ in range(2):
        (replica(torch.zeros(1, 7, dtype=torch.float64, device="cuda")) * 0).sum().backward()
        model.zero_grad()
    if not finish:
        state.restart(0)
    optimizer, seen = _optimizer(model), []
    for step in range(STEPS):
        model.zero_grad()
        value = loss(replica, 0, step)
        with raise_if_the_host_waits(step > START + PROFILED):
            value.backward()
            if finish:
                state.finish()
        optimizer.step()
        seen.append(weights(model).cpu())
    return seen, buckets


def _check(found: list[torch.Tensor], expected: list[list[torch.Tensor]]) -> None:
    for one, (want,) in zip(found, expected, strict=True):
        torch.testing.assert_close(one, want, rtol=1e-8, atol=1e-10)


def test_layers_are_averaged_on_a_measured_schedule():
    sync = PartialSync(3, START)
    found, buckets = _train(sync, finish=True)
    assert {bucket for due in sync.schedule for bucket in due} == set(range(len(buckets)))
    ranks = Simulated(1, _optimizer)
    _check(found, partial_sync(ranks, buckets, sync.schedule, START + PROFILED, STEPS))


def test_chunks_are_averaged():
    flow = GradientFlow(0.25, 8, 0.9)
    found, buckets = _train(flow, finish=False)
    ranks = Simulated(1, _optimizer)

    def count(step: int, chunks: int) -> int:
        return max(1, round(chunks * 0.25)) if step else chunks

    _check(found, gradient_flow(ranks, buckets, count, 8, 0.9, STEPS))
