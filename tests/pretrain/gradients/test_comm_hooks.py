"""Runs under PyTorch's communication hooks: losses, resuming, steps left out, bad settings."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bert_unpad.optim import FusedAdam
from bert_unpad.pretrain.config import ClipConfig, CommConfig, ConfigError, read_config
from bert_unpad.pretrain.gradients.clipping import Clipping, step_if
from bert_unpad.pretrain.gradients.comm_hooks import build_comm_hook
from bert_unpad.pretrain.ranks import Ranks
from tests.support.pretrain_runs import finish, losses, make_folder, run_in_turn
from tests.support.processes import run_ranks, start_ranks

pytestmark = pytest.mark.slow

STEPS = 18
POWER = ["--comm.hook", "power_sgd", "--comm.start", "3"]
LOCAL = ["--comm.hook", "post_local_sgd", "--comm.start", "3", "--comm.local_sgd_group", "1"]
LOCAL += ["--comm.local_sgd_period", "4"]
BUCKET = ["--clip.mode", "bucket", "--clip.policy", "adaptive", "--clip.max_norm", "0.5"]


BASE = ["--schedule.epochs", "null", "--schedule.total_steps", str(STEPS), "--optimizer.lr", "3e-3"]
BASE += ["--checkpoint.every", "7", "--checkpoint.keep_last", "9", "--logging.examples", "false"]
BASE += ["--logging.progress", "none"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("comm")
    make_folder(path)
    runs = {"plain": BUCKET, "power": [*POWER, *BUCKET], "local": [*LOCAL, *BUCKET]}
    runs["local, bf16"] = [*runs["local"], "--clip.wire_dtype", "bf16"]
    run_in_turn(path, 2, runs, BASE)
    return path


def _mean_losses(folder: Path, name: str) -> list[float]:
    found = losses(folder / name)
    assert len(found) == STEPS
    return [values[0] for values in found.values()]


def test_hooks_train_as_well_and_begin_when_told(folder):
    plain = _mean_losses(folder, "plain")
    for name in ("plain", "power", "local"):
        found = _mean_losses(folder, name)
        assert sum(found[-4:]) / 4 < found[0] - 0.1, name
    for name in ("power", "local"):
        # The fourth update is the first that is another; the fifth step the first to see it. Here
        # DDP has one bucket anyway.
        found = _mean_losses(folder, name)
        assert found[:4] == pytest.approx(plain[:4], rel=1e-6)
        assert found[4:] != pytest.approx(plain[4:], rel=1e-6)


def test_local_gradients_may_travel_in_16_bits(folder):
    found, want = (_mean_losses(folder, name) for name in ("local, bf16", "local"))
    assert found != want
    assert found == pytest.approx(want, rel=1e-2)


def test_a_resumed_run_goes_on_as_one_without_interruption(folder):
    names = {"power": [*POWER, *BUCKET], "local": [*LOCAL, *BUCKET]}
    for name in names:
        shutil.copytree(folder / name, folder / f"{name}-resumed")
        for saved in (folder / f"{name}-resumed" / "checkpoints").iterdir():
            if int(saved.name.removeprefix("step-")) > 7:
                shutil.rmtree(saved)
    run_in_turn(folder, 2, {f"{name}-resumed": more for name, more in names.items()}, BASE)
    for name in names:
        assert losses(folder / f"{name}-resumed") == losses(folder / name), name


def _steps(rank: int, world_size: int, comm: CommConfig, mode: str) -> dict:
    """Some steps on a model of two layers; rank 1 has a NaN in step 4."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 32), nn.Linear(32, 24))
    ranks = Ranks(rank, world_size, torch.device("cpu"), dist.group.WORLD)
    hook = build_comm_hook(comm, ranks)
    clipping = Clipping(ClipConfig(max_norm=0.5, mode=mode), ranks, model, hook)
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    clipping.attach(replica)
    for _ in range(2):
        (replica(torch.zeros(1, 24)) * 0).sum().backward()
        model.zero_grad()
    hook.start(0)
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    draw = torch.Generator().manual_seed(rank)
    finite, weights = [], []
    for step in range(9):
        x = torch.randn(16, 24, generator=draw)
        if (rank, step) == (1, 4):
            x[3, 5] = math.nan
        (replica(x) - x.roll(1, 1)).square().mean().backward()
        every_finite = hook.agree(clipping.clip().finite)
        step_if(optimizer, every_finite)
        hook.after_update(model.parameters())
        optimizer.zero_grad()
        finite.append(bool(every_finite))
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]).clone())
    hook.synchronise(model, optimizer)
    states = [v for p in model.parameters() for _, v in sorted(optimizer.state[p].items())]
    everything = [*(p.detach() for p in model.parameters()), *states]
    return {"finite": finite, "weights": weights, "end": [t.clone() for t in everything]}


CASES = [(hook, m) for hook in ("power_sgd", "post_local_sgd") for m in ("bucket", "after", "none")]


def _all_cases(rank: int, world_size: int) -> dict[tuple[str, str], dict]:
    return {
        (hook, mode): _steps(
            rank,
            world_size,
            CommConfig(hook=hook, start=2, local_sgd_period=3, local_sgd_group=1),
            mode,
        )
        for hook, mode in CASES
    }


@pytest.fixture(scope="module")
def both_ranks() -> list[dict]:
    return run_ranks(_all_cases, 2)


@pytest.mark.parametrize(("hook", "mode"), CASES)
def test_all_ranks_leave_a_step_out_together_and_go_on(both_ranks, hook, mode):
    one, other = (results[hook, mode] for results in both_ranks)
    assert one["finite"] == other["finite"] == [step != 4 for step in range(9)]
    for step in range(9):
        same = torch.equal(one["weights"][step], other["weights"][step])
        # Local SGD averages behind steps 2, 5 and 8 (counted from 0), the first of which is the
        # first with gradients of each rank's own.
        assert same == (hook == "power_sgd" or step < 3 or step in (5, 8)), step
        if step == 4:
            assert torch.equal(one["weights"][4], one["weights"][3])
        elif step:
            assert not torch.equal(one["weights"][step], one["weights"][step - 1])
        assert one["weights"][step].isfinite().all()
    assert all(torch.equal(a, b) for a, b in zip(one["end"], other["end"], strict=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([*POWER, "--clip.mode", "before"], "comm.hook: expected .* with clip.mode before"),
        ([*POWER, "--clip.wire_dtype", "bf16"], "clip.wire_dtype: expected fp32 with comm.hook"),
        ([*POWER, "--comm.power_sgd_rank", "0"], "comm.power_sgd_rank: expected a number >= 1"),
        ([*LOCAL, "--comm.local_sgd_period", "1"], "comm.local_sgd_period: expected .* >= 2"),
        ([*LOCAL, "--comm.start", "-1"], "comm.start: expected a number >= 0"),
        (["--comm.bucket_mb", "0"], "comm.bucket_mb: expected a number > 0"),
        (
            ["--comm.bucket_mb", "1", "--clip.mode", "before"],
            "comm.bucket_mb: expected null with clip",
        ),
    ],
)
def test_settings_that_do_not_go_together(settings, message):
    needed = ["--batching.global_batch_size", "8", "--schedule.total_steps", "3"]
    with pytest.raises(ConfigError, match=message):
        read_config([*needed, *settings])


@pytest.mark.parametrize(("size", "message"), [(3, "does not divide"), (4, "are one group")])
def test_groups_that_do_not_fit(size, message):
    ranks = Ranks(0, 4, torch.device("cpu"), None)
    comm = CommConfig(hook="post_local_sgd", local_sgd_group=size)
    with pytest.raises(ConfigError, match=message):
        build_comm_hook(comm, ranks)


def _tune(arguments: list[str]) -> int:
    from benchmarks import bucket_size

    return bucket_size.main(arguments)


def test_buckets_are_sized_by_measurement(folder):
    arguments = ["--sizes", "0.01", "1", "--rounds", "2", "--config", str(folder / "run.yaml")]
    arguments += BUCKET
    codes, output = finish(
        folder, "tune", start_ranks(_tune, 2, arguments, log=folder / "tune.log")
    )
    assert codes == [0, 0], output
    lines = [line for line in output.splitlines() if "bucket_mb" in line]
    assert [line.split(":")[0] for line in lines[:2]] == [
        "comm.bucket_mb 0.01",
        "comm.bucket_mb 1",
    ]
    seconds = {line.split()[1].rstrip(":"): float(line.split()[2]) for line in lines[:2]}
    assert lines[2] == f"fastest: --comm.bucket_mb {min(seconds, key=seconds.get)}"
