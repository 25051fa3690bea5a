"""Runs under PyTorch's communication hooks: losses, resuming, steps left out, bad settings."""

from pathlib import Path
from typing import get_args

import pytest
import torch

from bert_unpad.pretrain.config import CommConfig, ConfigError, read_config
from bert_unpad.pretrain.config.communication import CommHookName
from bert_unpad.pretrain.gradients.comm_hooks import HOOKS, build_comm_hook
from bert_unpad.pretrain.parallel.ddp import wrap_in_ddp
from bert_unpad.pretrain.ranks import Ranks
from tests.support.ddp_steps import ddp_steps
from tests.support.pretrain_runs import (
    finish,
    go_back,
    losses,
    make_folder,
    mean_losses,
    run_in_turn,
)
from tests.support.processes import run_ranks, start_ranks

pytestmark = pytest.mark.slow

STEPS = 18
POWER = ["--comm.hook", "power_sgd", "--comm.start", "3"]
LOCAL = ["--comm.hook", "post_local_sgd", "--comm.start", "3", "--comm.local_sgd_group", "1"]
LOCAL += ["--comm.local_sgd_period", "4"]
DREAM = ["--comm.hook", "dream_ddp", "--comm.start", "3"]
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


def test_hooks_train_as_well_and_begin_when_told(folder):
    plain = mean_losses(folder / "plain", STEPS)
    for name in ("plain", "power", "local"):
        found = mean_losses(folder / name, STEPS)
        assert sum(found[-4:]) / 4 < found[0] - 0.1, name
    for name in ("power", "local"):
        # The fourth update is the first that is another; the fifth step the first to see it. Here
        # DDP has one bucket anyway.
        found = mean_losses(folder / name, STEPS)
        assert found[:4] == pytest.approx(plain[:4], rel=1e-6)
        assert found[4:] != pytest.approx(plain[4:], rel=1e-6)


def test_local_gradients_may_travel_in_16_bits(folder):
    found, want = (mean_losses(folder / name, STEPS) for name in ("local, bf16", "local"))
    assert found != want
    assert found == pytest.approx(want, rel=1e-2)


def test_a_resumed_run_goes_on_as_one_without_interruption(folder):
    names = {"power": [*POWER, *BUCKET], "local": [*LOCAL, *BUCKET]}
    copies = {go_back(folder, name, 7): name for name in names}
    run_in_turn(folder, 2, {copy: names[name] for copy, name in copies.items()}, BASE)
    for copy, name in copies.items():
        assert losses(folder / copy) == losses(folder / name), name


def test_another_hook_drops_the_memory_of_the_one_before(folder):
    copy = go_back(folder, "power", 14, "power, then averages of models")
    run_in_turn(folder, 2, {copy: [*DREAM, *BUCKET]}, BASE)
    assert "memory of another comm hook" in (folder / "runs.log.0").read_text()
    found, before = (mean_losses(folder / name, STEPS) for name in (copy, "power"))
    assert found[:15] == before[:15]
    assert sum(found[-3:]) / 3 < found[0] - 0.1


CASES = [(hook, m) for hook in ("power_sgd", "post_local_sgd") for m in ("bucket", "after", "none")]


def _all_cases(rank: int, world_size: int) -> dict[tuple[str, str], dict]:
    return {
        (hook, mode): ddp_steps(
            rank,
            world_size,
            CommConfig(hook=hook, start=2, local_sgd_period=3, local_sgd_group=1),
            mode,
            steps=9,
            nan_step=4,
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


@pytest.mark.parametrize("size", [3, 4, 8])
def test_groups_that_do_not_fit(size):
    ranks = Ranks(0, 4, torch.device("cpu"), None)
    comm = CommConfig(hook="post_local_sgd", local_sgd_group=size)
    message = f"comm.local_sgd_group: expected a divisor of the 4 ranks .*, got {size}"
    with pytest.raises(ConfigError, match=message):
        build_comm_hook(comm, ranks)


def test_every_hook_has_a_name():
    assert tuple(HOOKS) == get_args(CommHookName)


def test_a_size_of_buckets_where_there_is_one():
    ranks = Ranks(0, 2, torch.device("cpu"), None)
    hook = build_comm_hook(CommConfig(hook="power_sgd"), ranks)
    with pytest.raises(ConfigError, match=r"comm.bucket_mb: expected null on CPUs .*, got 0.5"):
        wrap_in_ddp(torch.nn.Linear(2, 2), ranks, hook, bucket_mb=0.5)


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
