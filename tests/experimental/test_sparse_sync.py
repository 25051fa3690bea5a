"""Runs that average less: the model layer by layer (dream_ddp), chunks of it (gradient_flow)."""

from pathlib import Path

import pytest
import torch
from torch import nn

from bert_unpad.experimental.dream_ddp import PROFILED
from bert_unpad.pretrain.config import CommConfig, ConfigError, read_config
from bert_unpad.pretrain.gradients.comm_hooks import build_comm_hook
from bert_unpad.pretrain.ranks import Ranks
from tests.support.ddp_steps import ddp_steps
from tests.support.pretrain_runs import go_back, losses, make_folder, mean_losses, run_in_turn
from tests.support.processes import run_ranks

pytestmark = pytest.mark.slow

STEPS, START = 20, 3
DREAM = ["--comm.hook", "dream_ddp", "--comm.local_sgd_period", "3"]
FLOW = ["--comm.hook", "gradient_flow", "--comm.chunk_share", "0.2", "--comm.chunk_size", "64"]
BUCKET = ["--clip.mode", "bucket", "--clip.policy", "adaptive", "--clip.max_norm", "0.5"]
BASE = ["--schedule.epochs", "null", "--schedule.total_steps", str(STEPS), "--optimizer.lr", "3e-3"]
BASE += ["--checkpoint.keep_last", "9", "--checkpoint.every", "5", "--comm.bucket_mb", "0.01"]
BASE += ["--logging.examples", "false", "--logging.progress", "none", "--comm.start", str(START)]
RUNS = {
    "dream": DREAM,
    "dream, bucket": [*DREAM, *BUCKET, "--optimizer.name", "lamb", "--optimizer.lr", "0.03"],
    "dream, accumulated": [*DREAM, "--batching.accumulation", "2"],
    "dream, fp16": [*DREAM, "--precision", "fp16"],
    "flow": FLOW,
    "flow, sharded": [*FLOW, "--optimizer.shard", "world"],
    "flow, bucket": [*FLOW, *BUCKET],
    "flow, fp16": [*FLOW, "--precision", "fp16"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("sparse")
    make_folder(path)
    run_in_turn(path, 2, {"plain": [], **RUNS}, BASE)
    return path


@pytest.mark.parametrize(("name", "same"), [("dream", START + PROFILED + 1), ("flow", START + 2)])
def test_runs_learn_and_begin_when_told(folder, name, same):
    plain, found = mean_losses(folder / "plain", STEPS), mean_losses(folder / name, STEPS)
    assert len(found) == STEPS
    assert found[:same] == pytest.approx(plain[:same], rel=1e-6)
    assert found[same:] != pytest.approx(plain[same:], rel=1e-6)


@pytest.mark.parametrize("name", RUNS)
def test_every_run_learns(folder, name):
    found = mean_losses(folder / name, STEPS)
    assert sum(found[-4:]) / 4 < found[0] - 0.1


def test_a_sharded_optimizer_gives_the_same_bits(folder):
    assert losses(folder / "flow, sharded") == losses(folder / "flow")


def test_a_resumed_run_goes_on_as_one_without_interruption(folder):
    # The first has half of its times measured, and is compared as long as these do not matter.
    points = [
        ("dream", 5, START + PROFILED + 1),
        ("dream", 10, STEPS),
        ("dream, bucket", 10, STEPS),
    ]
    points += [("flow", 5, STEPS), ("flow", 10, STEPS), ("flow, bucket", 10, STEPS)]
    again = {go_back(folder, name, step): (name, last) for name, step, last in points}
    run_in_turn(folder, 2, {copy: RUNS[name] for copy, (name, _) in again.items()}, BASE)
    for copy, (name, last) in again.items():
        found, want = losses(folder / copy), losses(folder / name)
        assert len(found) == STEPS
        assert {s: x for s, x in found.items() if s <= last} == {
            s: x for s, x in want.items() if s <= last
        }, copy


def test_another_number_of_ranks_goes_on_with_averages(folder):
    """Its times are measured again, and what was kept of gradients is gone."""
    copies = {go_back(folder, name, 15): name for name in ("dream", "flow")}
    run_in_turn(folder, 3, {copy: RUNS[name] for copy, name in copies.items()}, BASE)
    for copy in copies:
        found = mean_losses(folder / copy, STEPS)
        assert len(found) == STEPS
        assert sum(found[-4:]) / 4 < found[0] - 0.1


CASES = [(h, m) for h in ("dream_ddp", "gradient_flow") for m in ("bucket", "after", "none")]


def _all_cases(rank: int, world_size: int) -> dict[tuple[str, str], dict]:
    more = {"start": 2, "local_sgd_period": 3, "chunk_share": 0.2, "chunk_size": 16}
    return {
        (hook, mode): ddp_steps(
            *(rank, world_size, CommConfig(hook=hook, **more), mode), steps=15, nan_step=10
        )
        for hook, mode in CASES
    }


@pytest.fixture(scope="module")
def both_ranks() -> list[dict]:
    return run_ranks(_all_cases, 2)


@pytest.mark.parametrize(("hook", "mode"), CASES)
def test_all_ranks_leave_a_step_out_together_and_go_on(both_ranks, hook, mode):
    one, other = (results[hook, mode] for results in both_ranks)
    assert one["finite"] == other["finite"] == [step != 10 for step in range(15)]
    for step in range(15):
        same = torch.equal(one["weights"][step], other["weights"][step])
        assert same == (hook == "gradient_flow" or step < 2 + PROFILED), step
        assert one["weights"][step].isfinite().all()
        if step and not (hook == "dream_ddp" and step == 10):  # which averages all the same
            changed = not torch.equal(one["weights"][step], one["weights"][step - 1])
            assert changed == (step != 10)
    assert all(torch.equal(a, b) for a, b in zip(one["end"], other["end"], strict=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            [*DREAM, "--clip.mode", "before"],
            "comm.hook: expected .* with clip.mode before, .*dr",
        ),
        (
            [*FLOW, "--clip.mode", "before"],
            "comm.hook: expected .* with clip.mode before, .*gra",
        ),
        ([*DREAM, "--clip.wire_dtype", "bf16"], "wire_dtype: expected fp32 with comm.hook dream_d"),
        ([*FLOW, "--clip.wire_dtype", "bf16"], "wire_dtype: expected fp32 with comm.hook gradient"),
        ([*DREAM, "--optimizer.shard", "world"], "optimizer.shard: expected none with comm.hook d"),
        ([*DREAM, "--growth.name", "stacking"], "comm.hook: expected allreduce with growth.name s"),
        ([*FLOW, "--growth.name", "layer_drop"], "comm.hook: expected allreduce with growth.name "),
        (["--comm.chunk_share", "0"], "comm.chunk_share: expected a number > 0 and <= 1, got 0"),
        (["--comm.chunk_share", "1.5"], "comm.chunk_share: expected a number > 0 and <= 1, got 1"),
        (["--comm.chunk_size", "0"], "comm.chunk_size: expected a number >= 1, got 0"),
    ],
)
def test_settings_that_do_not_go_together(settings, message):
    needed = ["--batching.global_batch_size", "8", "--schedule.total_steps", "3"]
    with pytest.raises(ConfigError, match=message):
        read_config([*needed, *settings])


@pytest.mark.parametrize(
    ("optimizer", "momentum"),
    [
        (torch.optim.AdamW([nn.Parameter(torch.zeros(1))], betas=(0.8, 0.99)), 0.8),
        (torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.7), 0.7),
        (torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), 1.0),
        (torch.optim.Adagrad([nn.Parameter(torch.zeros(1))]), 1.0),
    ],
)
def test_what_is_kept_decays_as_the_optimizers_momentum(optimizer, momentum):
    ranks = Ranks(0, 2, torch.device("cpu"), None)
    hook = build_comm_hook(CommConfig(hook="gradient_flow"), ranks, optimizer)
    assert hook.state.momentum == momentum
