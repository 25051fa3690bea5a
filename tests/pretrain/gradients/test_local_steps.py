"""Runs of an optimizer that makes local steps (mt_dao): warm-up, resuming, steps left out."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bert_unpad.optim import MTDAO
from bert_unpad.pretrain.config import ClipConfig, CommConfig, ConfigError, read_config
from bert_unpad.pretrain.gradients.clipping import Clipping, step_if
from bert_unpad.pretrain.gradients.comm_hooks import build_comm_hook
from bert_unpad.pretrain.ranks import Ranks
from tests.support.pretrain_runs import losses, make_folder, run_in_turn
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


def _mean_losses(folder: Path, name: str) -> list[float]:
    found = [values[0] for values in losses(folder / name).values()]
    assert len(found) == STEPS
    return found


@pytest.mark.parametrize("name", ["averaged", *RUNS])
def test_every_run_learns(folder, name):
    found = _mean_losses(folder, name)
    assert sum(found[-4:]) / 4 < found[0] - 0.1


def test_steps_are_local_after_the_warm_up(folder):
    averaged, found = _mean_losses(folder, "averaged"), _mean_losses(folder, "local")
    assert found[: START + 1] == pytest.approx(averaged[: START + 1], rel=1e-6)
    assert found[START + 1 :] != pytest.approx(averaged[START + 1 :], rel=1e-6)


def _go_back(folder: Path, name: str, step: int) -> str:
    copy = f"{name}, from {step}"
    shutil.copytree(folder / name, folder / copy)
    for saved in (folder / copy / "checkpoints").iterdir():
        if int(saved.name.removeprefix("step-")) > step:
            shutil.rmtree(saved)
    return copy


def test_a_resumed_run_goes_on_as_one_without_interruption(folder):
    again = {_go_back(folder, name, 10): name for name in RUNS}
    again[_go_back(folder, "local", 5)] = "local"
    run_in_turn(folder, 2, {copy: RUNS[name] for copy, name in again.items()}, BASE)
    for copy, name in again.items():
        assert losses(folder / copy) == losses(folder / name), copy


def test_another_number_of_ranks_goes_on(folder):
    copy = _go_back(folder, "local", 15)
    run_in_turn(folder, 3, {copy: RUNS["local"]}, BASE)
    found = _mean_losses(folder, copy)
    assert found[:15] == _mean_losses(folder, "local")[:15]
    assert sum(found[-4:]) / 4 < found[0] - 0.1


def _steps(rank: int, world_size: int, mode: str) -> dict:
    """Some steps on a model of two layers; rank 1 has a NaN in step 6."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 32), nn.Linear(32, 24))
    ranks = Ranks(rank, world_size, torch.device("cpu"), dist.group.WORLD)
    optimizer = MTDAO(model.parameters(), lr=1e-2, period=3)
    hook = build_comm_hook(CommConfig(start=2), ranks, optimizer)
    clipping = Clipping(ClipConfig(max_norm=0.5, mode=mode), ranks, model, hook)
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    clipping.attach(replica)
    for _ in range(2):
        (replica(torch.zeros(1, 24)) * 0).sum().backward()
        model.zero_grad()
    hook.start(0)
    draw = torch.Generator().manual_seed(rank)
    finite, weights = [], []
    for step in range(11):
        x = torch.randn(16, 24, generator=draw)
        if (rank, step) == (1, 6):
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


MODES = ("bucket", "after", "none")


def _all_modes(rank: int, world_size: int) -> dict[str, dict]:
    return {mode: _steps(rank, world_size, mode) for mode in MODES}


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
        (["--growth.name", "stacking"], "optimizer.name: expected another than mt_dao with growth"),
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
