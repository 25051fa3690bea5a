"""Allreduces in two hops: four ranks as two nodes of two, against flat ones."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bert_unpad.distributed import BucketClip, HierarchicalAllreduce
from tests.support.pretrain_runs import losses, make_folder, run_in_turn
from tests.support.processes import run_ranks
from tests.support.seeds import derived

pytestmark = pytest.mark.slow

SIZES = (1, 7, 1000, 0, 33)


def _sums(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    with pytest.raises(ValueError, match="node_size: expected a divisor of the number of ranks"):
        HierarchicalAllreduce(3)
    allreduce = HierarchicalAllreduce(2)
    draw = torch.Generator().manual_seed(derived(rank))
    results = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        given = [torch.randn(size, generator=draw).to(dtype) for size in SIZES]
        for name, tensors in (("one", given), ("two", [t.clone() for t in given])):
            futures = [allreduce(t.clone()) for t in tensors]  # all under way at the same time
            results[name, dtype] = torch.cat([future.wait() for future in futures])
        exact = torch.cat(given).double()
        dist.all_reduce(exact)
        results["exact", dtype] = exact
    results["clipped"] = _clipped(rank, allreduce)
    results["clipped, flat"] = _clipped(rank, None)
    return results


def _clipped(rank: int, allreduce: HierarchicalAllreduce | None) -> torch.Tensor:
    """The averages of a few steps of a model in several buckets, which travel as bf16."""
    torch.manual_seed(derived(0))
    model = nn.Sequential(nn.Linear(24, 32), nn.Linear(32, 24))
    replica = DistributedDataParallel(model, bucket_cap_mb=0.002, gradient_as_bucket_view=True)
    clip = BucketClip(0.5, wire_dtype=torch.bfloat16, error_feedback=True)
    clip.attach(replica, allreduce=allreduce)
    draw = torch.Generator().manual_seed(derived(10 + rank))
    seen = []
    for _ in range(4):
        replica(torch.randn(8, 24, generator=draw)).square().mean().backward()
        report = clip.report()
        assert bool(report.finite)
        seen.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        model.zero_grad()
    assert len(report.norms) > 1  # DDP has one bucket in the first pass
    return torch.stack(seen)


def test_sums_are_those_of_a_flat_allreduce_and_the_same_bits_everywhere():
    ranks = run_ranks(_sums, 4)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for rank in ranks:
            assert torch.equal(rank["one", dtype], ranks[0]["one", dtype])
            assert torch.equal(rank["two", dtype], rank["one", dtype])
        # Three additions, of numbers below 8.
        error = (ranks[0]["one", dtype].double() - ranks[0]["exact", dtype]).abs().max()
        assert error <= 3 * 8 * torch.finfo(dtype).eps / 2
    for rank in ranks:
        assert torch.equal(rank["clipped"], ranks[0]["clipped"])
    flat = ranks[0]["clipped, flat"]
    eps = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(ranks[0]["clipped"], flat, rtol=2 * eps, atol=eps * 0.02)


BASE = ["--schedule.epochs", "null", "--schedule.total_steps", "6", "--optimizer.lr", "3e-3"]
BASE += ["--checkpoint.every", "0", "--logging.progress", "none", "--logging.examples", "false"]
HOPS = ["--comm.hook", "hierarchical"]
MODES = {
    "bucket": ["--clip.mode", "bucket", "--comm.bucket_mb", "0.01"],
    "before": ["--clip.mode", "before", "--clip.wire_dtype", "bf16"],
    "after": ["--clip.mode", "after", "--precision", "fp16"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("hops")
    make_folder(path)
    runs = {f"{name}-hops": [*settings, *HOPS] for name, settings in MODES.items()}
    runs["bucket-again"] = runs["bucket-hops"]
    run_in_turn(path, 4, MODES | runs, BASE, node_size=2)
    return path


@pytest.mark.parametrize("mode", MODES)
def test_runs_train_as_with_a_flat_allreduce(folder, mode):
    flat, hops = losses(folder / mode), losses(folder / f"{mode}-hops")
    assert len(hops) == 6
    rel = 2e-3 if mode == "before" else 1e-4  # which adds in bf16
    for step, values in flat.items():
        assert hops[step] == pytest.approx(values, rel=rel, abs=1e-6), step
    if mode == "bucket":
        assert losses(folder / "bucket-again") == hops
