"""Runs of an optimizer that makes local steps (mt_dao): warm-up, resuming, steps left out."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from bert_unpad.experimental import MTDAO
from bert_unpad.pretrain.config import CommConfig, ConfigError, read_config
from bert_unpad.pretrain.gradients.comm_hooks import build_comm_hook
from bert_unpad.pretrain.ranks import Ranks
from tests.support.ddp_steps import ddp_steps
from tests.support.pretrain_runs import go_back, losses, make_folder, mean_losses, run_in_turn
from tests.support.processes import run_ranks

pytestmark = pytest.mark.slow

STEPS, START = 20, 3
MT_DAO = ["--optimizer.name", "mt_dao", "--optimizer.arguments", '{"period": 4}']
MT_DAO += ["--optimizer.betas", "[0.99, 0.99]"]
BUCKET = ["--clip.mode", "bucket", "--clip.max_norm", "0.5", "--clip.wire_dtype", "bf16"]
BASE = ["--schedule.epochs", "null", "--schedule.total_steps", str(STEPS), "--optimizer.lr", "3e-3"]
BASE += ["--checkpoint.keep_last", "9", "--checkpoint.every", "5", "--comm.start", str(START)]
BASE += ["--logging.examples", "false", "--logging.progress", "none"]
RUNS = {
    "local": MT_DAO,
    "local, bucket": [*MT_DAO, *BUCKET],
    "local, before": [*MT_DAO, "--clip.mode", "before", "--precision", "fp16"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("local")
    make_folder(path)
    averaged = [*MT_DAO, "--comm.start", str(STEPS)]
    run_in_turn(path, 2, {"averaged": averaged, **RUNS}, BASE)
    return path


@pytest.mark.parametrize("name", ["averaged", *RUNS])
def test_every_run_learns(folder, name):
    found = mean_losses(folder / name, STEPS)
    assert sum(found[-4:]) / 4 < found[0] - 0.1


def test_steps_are_local_after_the_warm_up(folder):
    averaged, found = mean_losses(folder / "averaged", STEPS), mean_losses(folder / "local", STEPS)
    assert found[: START + 1] == pytest.approx(averaged[: START + 1], rel=1e-6)
    assert found[START + 1 :] != pytest.approx(averaged[START + 1 :], rel=1e-6)


def test_a_resumed_run_goes_on_as_one_without_interruption(folder):
    again = {go_back(folder, name, 10): name for name in RUNS}
    again[go_back(folder, "local", 5)] = "local"
    run_in_turn(folder, 2, {copy: RUNS[name] for copy, name in again.items()}, BASE)
    for copy, name in again.items():
        assert losses(folder / copy) == losses(folder / name), copy


def test_another_number_of_ranks_goes_on(folder):
    copy = go_back(folder, "local", 15)
    run_in_turn(folder, 3, {copy: RUNS["local"]}, BASE)
    found = mean_losses(folder / copy, STEPS)
    assert found[:15] == mean_losses(folder / "local", STEPS)[:15]
    assert sum(found[-4:]) / 4 < found[0] - 0.1


MODES = ("bucket", "after", "none")


def _all_modes(rank: int, world_size: int) -> dict[str, dict]:
    make_optimizer = partial(MTDAO, lr=1e-2, period=3)
    more = {"steps": 11, "nan_step": 6, "make_optimizer": make_optimizer}
    return {mode: ddp_steps(rank, world_size, CommConfig(start=2), mode, **more) for mode in MODES}


@pytest.fixture(scope="module")
def both_ranks() -> list[dict]:
    return run_ranks(_all_modes, 2)


@pytest.mark.parametrize("mode", MODES)
def test_all_ranks_leave_a_step_out_together_and_go_on(both_ranks, mode):
    one, other = (results[mode] for results in both_ranks)
    assert one["finite"] == other["finite"] == [step != 6 for step in range(11)]
    for step in range(11):
        same = torch.equal(one["weights"][step], other["weights"][step])
        # Averages after the third and sixth local step, counted from 0: steps 4 and 8.
        assert same == (step < 2 or step in (4, 8)), step
        if step:
            changed = not torch.equal(one["weights"][step], one["weights"][step - 1])
            assert changed == (step != 6)
    assert all(torch.equal(a, b) for a, b in zip(one["end"], other["end"], strict=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["--growth.name", "stacking"],
            "optimizer.name: expected another than mt_dao, .* with",
        ),
        (["--comm.start", "-1"], "comm.start: expected a number >= 0, got -1"),
    ],
)
def test_settings_that_do_not_go_together(settings, message):
    needed = ["--batching.global_batch_size", "8", "--schedule.total_steps", "3"]
    with pytest.raises(ConfigError, match=message):
        read_config([*needed, *MT_DAO, *settings])


def test_no_other_comm_hook():
    optimizer = MTDAO([nn.Parameter(torch.zeros(1))])
    ranks = Ranks(0, 2, torch.device("cpu"), None)
    with pytest.raises(ConfigError, match=r"comm\.hook: expected allreduce with an optimizer that"):
        build_comm_hook(CommConfig(hook="power_sgd"), ranks, optimizer)
