"""clip_bucket_ and BucketClip on a GPU: values, streams, graphs, NCCL with one rank."""

import math
import subprocess
import sys
from importlib.util import find_spec

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

built = pytest.mark.skipif(find_spec("bert_unpad._C_cuda") is None, reason="built without nvcc")

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# Bucket, wire, with a residual.
CASES = [
    *((dtype, dtype, False) for dtype in (F32, BF16, F16)),
    *((F32, BF16, False), (F32, F16, False), (BF16, F32, False), (F16, F32, False)),
    *((F32, BF16, True), (F32, F16, True)),
]


@built
def test_kernels_are_built_and_registered():
    """In its own process: elsewhere the CUDA module is loaded under a CUDA PyTorch only."""
    code = """
import torch, bert_unpad
from bert_unpad import _C_cuda
for op in ("clip_bucket_", "clip_bucket_into"):
    print(torch._C._dispatch_has_kernel_for_dispatch_key(f"bert_unpad::{op}", "CUDA"))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert out.stdout.split() == ["True", "True"]


def draw(size, dtype, seed=0, shift=0):
    generator = torch.Generator("cuda").manual_seed(derived(seed))
    return torch.randn(size + shift, generator=generator, device="cuda").to(dtype)[shift:]


class TestClipBucket:
    pytestmark = GPU_ONLY

    @pytest.mark.sanitizer
    @pytest.mark.parametrize("case", CASES, ids=str)
    @pytest.mark.parametrize("size", [0, 1, 3, 1029, 65_536, 3_000_001])
    def test_values(self, size, case):
        dtype, wire, with_residual = case
        for share, shift in ((0.3, 0), (2.0, 1)):
            bucket = draw(size, dtype, shift=shift)
            residual = 0.01 * draw(size, F32, 1) if with_residual else None
            u = bucket.double() if residual is None else (bucket + residual).double()
            out = None if wire == dtype else torch.full((size,), math.nan, device="cuda").to(wire)
            bound = (share * u.norm()).float()
            norm = ops.clip_bucket_(bucket, bound, factor=0.5, out=out, residual=residual)
            got = bucket if out is None else out
            exact = u * min(1.0, share) * 0.5
            torch.testing.assert_close(norm.double(), u.norm(), rtol=1e-5, atol=0)
            rtol = 1e-5 + torch.finfo(wire).eps / 2
            torch.testing.assert_close(got.double(), exact, rtol=rtol, atol=1e-7)
            if residual is not None:
                total = got.double() + 0.5 * residual.double()
                torch.testing.assert_close(total, exact, rtol=1e-5, atol=1e-9)

    @pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
    @pytest.mark.parametrize("dtype", [F32, BF16, F16])
    def test_what_is_not_finite_spreads_over_the_bucket(self, dtype, value):
        bucket = draw(1_000_000, dtype)
        bucket[77] = value
        assert not ops.clip_bucket_(bucket, 1.0).isfinite()
        assert bucket.isnan().all()

    def test_same_bits_every_time(self):
        first = draw(1_000_003, F32)
        norm = ops.clip_bucket_(first, 1.0)
        for _ in range(5):
            again = draw(1_000_003, F32)
            assert torch.equal(ops.clip_bucket_(again, 1.0), norm)
            assert torch.equal(again, first)

    def test_agrees_with_the_cpu(self):
        bucket = draw(100_001, F32)
        on_cpu = bucket.cpu()
        norm, want = ops.clip_bucket_(bucket, 1.0), ops.clip_bucket_(on_cpu, 1.0)
        torch.testing.assert_close(norm.cpu(), want, rtol=1e-5, atol=0)
        torch.testing.assert_close(bucket.cpu(), on_cpu, rtol=1e-5, atol=0)

    def test_runs_on_the_current_stream(self):
        def run(bucket: torch.Tensor) -> list[torch.Tensor]:
            clipped = bucket.clone()
            return [ops.clip_bucket_(clipped, 1.0), clipped]

        assert_runs_on_the_current_stream(run, draw(100_000, F32))

    def test_does_not_wait_for_the_device(self):
        bucket, bound = draw(100_000, F32), torch.ones((), device="cuda")
        out, residual = torch.empty_like(bucket, dtype=BF16), torch.zeros_like(bucket)
        with raise_if_the_host_waits():
            ops.clip_bucket_(bucket, bound, out=out, residual=residual)
            ops.clip_bucket_(bucket, 1.0)

    def test_can_be_captured_in_a_graph(self):
        bucket, bound = draw(100_000, F32), torch.full((), 0.5, device="cuda")
        out = torch.empty_like(bucket, dtype=BF16)

        def clip() -> list[torch.Tensor]:
            return [ops.clip_bucket_(bucket, bound, out=out), out.clone()]

        def change() -> None:
            bucket.mul_(3)
            bound.fill_(2)

        assert_graph_takes_new_values(clip, change)

    def test_opcheck(self):
        f = torch.ops.bert_unpad
        bucket, bound = draw(1000, F32), torch.ones((), device="cuda")
        torch.library.opcheck(f.clip_bucket_, (bucket, 1.0, bound, 0.5))
        out, residual = torch.empty_like(bucket, dtype=BF16), torch.zeros_like(bucket)
        torch.library.opcheck(f.clip_bucket_into, (bucket, out, residual, 1.0, None, 0.5))

    def test_wrong_arguments_are_named(self):
        bucket = draw(20, F32)
        for change, message in [
            ({"max_norm": torch.ones(())}, "bound must be on the same device"),
            ({"out": torch.empty(20)}, "out must be on the same device"),
            ({"out": torch.empty(19, device="cuda")}, "out must have as many elements"),
        ]:
            with pytest.raises(RuntimeError, match=message):
                ops.clip_bucket_(**({"bucket": bucket, "max_norm": 1.0} | change))


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
