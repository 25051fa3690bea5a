"""clip_bucket_ and BucketClip on a GPU: streams, graphs, NCCL with one rank."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bert_unpad import ops
from bert_unpad.distributed import BucketClip
from tests.support.cuda_checks import (
    GPU_ONLY,
    assert_graph_takes_new_values,
    assert_runs_on_the_current_stream,
    raise_if_the_host_waits,
)
from tests.support.seeds import derived

BF16, F16 = torch.bfloat16, torch.float16


def draw() -> torch.Tensor:
    return torch.randn(100_000, device="cuda")


class TestClipBucket:
    pytestmark = GPU_ONLY

    def test_runs_on_the_current_stream(self):
        def run(bucket: torch.Tensor) -> list[torch.Tensor]:
            clipped = bucket.clone()
            return [ops.clip_bucket_(clipped, 1.0), clipped]

        assert_runs_on_the_current_stream(run, draw())

    def test_does_not_wait_for_the_device(self):
        bucket, bound = draw(), torch.ones((), device="cuda")
        out, residual = torch.empty_like(bucket, dtype=BF16), torch.zeros_like(bucket)
        with raise_if_the_host_waits():
            ops.clip_bucket_(bucket, bound, out=out, residual=residual)
            ops.clip_bucket_(bucket, 1.0)

    def test_can_be_captured_in_a_graph(self):
        bucket, bound = draw(), torch.full((), 0.5, device="cuda")
        out = torch.empty_like(bucket, dtype=BF16)

        def clip() -> list[torch.Tensor]:
            return [ops.clip_bucket_(bucket, bound, out=out), out.clone()]

        def change() -> None:
            bucket.mul_(3)
            bound.fill_(2)

        assert_graph_takes_new_values(clip, change)


def train_on_nccl(policy, wire, feedback):
    """Norms and bounds of a few steps of DDP with one rank, and what they leave in `.grad`."""
    torch.manual_seed(derived(0))
    model = nn.Sequential(*[nn.Linear(300, 300) for _ in range(4)]).cuda()
    x = torch.randn(64, 300, device="cuda")
    replica = DistributedDataParallel(model, bucket_cap_mb=0.3, gradient_as_bucket_view=True)
    clip = BucketClip(0.5, policy, wire, feedback).attach(replica)
    found = []
    for step in range(5):  # the third pass is the first over buckets that stay
        with raise_if_the_host_waits(step > 2):
            replica(x).square().sum().backward()
            report = clip.report()
        with torch.no_grad():
            gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        found.append((report, gradient))
        replica.zero_grad()
    return found


class TestBucketClip:
    pytestmark = GPU_ONLY

    @pytest.fixture(scope="class", autouse=True)
    def nccl(self):
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()

    @pytest.mark.parametrize("policy", ["equal", "numel", "adaptive"])
    @pytest.mark.parametrize(("wire", "feedback"), [(None, False), (BF16, False), (F16, True)])
    def test_bounds_the_gradient_on_nccl(self, policy, wire, feedback):
        found = train_on_nccl(policy, wire, feedback)
        for report, gradient in found:
            assert bool(report.finite)
            assert int(report.clipped) > 0
            assert float(report.bounds.square().sum()) == pytest.approx(0.25, rel=1e-5)
            sent = torch.minimum(report.norms, report.bounds).norm()
            rtol = 1e-4 if wire is None else 1e-2
            torch.testing.assert_close(gradient.norm(), sent, rtol=rtol, atol=0)
        assert len(found[-1][0].norms) > 1
