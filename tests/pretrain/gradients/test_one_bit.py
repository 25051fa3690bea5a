"""Runs whose ranks exchange one bit a value: warm-up, resuming, steps left out, bad settings."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bert_unpad.optim import OneBitAdam, ZeroOneAdam
from bert_unpad.optim.one_bit import OneBitOptimizer
from bert_unpad.pretrain.config import ClipConfig, CommConfig, ConfigError, read_config
from bert_unpad.pretrain.gradients.clipping import Clipping, step_if
from bert_unpad.pretrain.gradients.comm_hooks import build_comm_hook
from bert_unpad.pretrain.ranks import Ranks
from tests.support.pretrain_runs import losses, make_folder, run_in_turn
from tests.support.processes import run_ranks

pytestmark = pytest.mark.slow

STEPS, START = 20, 6
BASE = ["--schedule.epochs", "null", "--schedule.total_steps", str(STEPS), "--optimizer.lr", "3e-3"]
BASE += ["--checkpoint.keep_last", "9", "--checkpoint.every", "5", "--comm.start", str(START)]
BASE += ["--logging.examples", "false", "--logging.progress", "none"]
ADAM, LAMB, ZERO_ONE = (
    ["--optimizer.name", name] for name in ("onebit_adam", "onebit_lamb", "zero_one_adam")
)
LAMB += ["--optimizer.lr", "0.02"]
# What has hardly a gradient, as biases of keys, moves by lr * scale / eps: much in a tiny model.
ZERO_ONE += ["--optimizer.eps", "1e-3"]
ZERO_ONE += ["--optimizer.arguments", '{"var_update_scaler": 4, "local_step_scaler": 4}']
BUCKET = ["--clip.mode", "bucket", "--clip.max_norm", "0.5", "--clip.wire_dtype", "bf16"]
RUNS = {
    "adam": ADAM,
    "adam, bucket": [*ADAM, *BUCKET, "--comm.bucket_mb", "0.01"],
    "adam, fp16": [*ADAM, "--precision", "fp16", "--batching.accumulation", "2"],
    "lamb": LAMB,
    "lamb, before": [*LAMB, "--clip.mode", "before", "--clip.max_norm", "0.5"],
    "zero one": ZERO_ONE,
    "zero one, none": [*ZERO_ONE, "--clip.mode", "none", "--precision", "bf16"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("bits")
    make_folder(path)
    late = ["--comm.start", str(STEPS)]
    more = {"averaged": [*ADAM, *late], "fused": ["--optimizer.name", "fused_adam"]}
    run_in_turn(path, 2, {**more, **RUNS}, BASE)
    return path


def _mean_losses(folder: Path, name: str) -> list[float]:
    found = [values[0] for values in losses(folder / name).values()]
    assert len(found) == STEPS
    return found


@pytest.mark.parametrize("name", RUNS)
def test_every_run_learns(folder, name):
    found = _mean_losses(folder, name)
    assert sum(found[-4:]) / 4 < found[0] - 0.1


def test_the_warm_up_is_adam(folder):
    assert losses(folder / "averaged") == losses(folder / "fused")
    plain, found = _mean_losses(folder, "fused"), _mean_losses(folder, "adam")
    assert found[: START + 1] == plain[: START + 1]
    assert found[START + 1 :] != plain[START + 1 :]


def _go_back(folder: Path, name: str, step: int, ranks: int = 2) -> str:
    copy = f"{name}, from {step} on {ranks}"
    shutil.copytree(folder / name, folder / copy)
    for saved in (folder / copy / "checkpoints").iterdir():
        if int(saved.name.removeprefix("step-")) > step:
            shutil.rmtree(saved)
    return copy


def test_a_resumed_run_goes_on_as_one_without_interruption(folder):
    """From the warm-up, from the middle, and from within an interval of 0/1 Adam."""
    points = [("lamb", 5), *((name, 10) for name in RUNS), ("zero one", 15)]
    again = {_go_back(folder, name, step): name for name, step in points}
    run_in_turn(folder, 2, {copy: RUNS[name] for copy, name in again.items()}, BASE)
    for copy, name in again.items():
        assert losses(folder / copy) == losses(folder / name), copy


def test_other_numbers_of_ranks_go_on(folder):
    for ranks in (1, 3):
        copies = {_go_back(folder, name, 10, ranks): name for name in ("adam", "lamb", "zero one")}
        run_in_turn(folder, ranks, {copy: RUNS[name] for copy, name in copies.items()}, BASE)
        for copy, name in copies.items():
            found = _mean_losses(folder, copy)
            assert found[:10] == _mean_losses(folder, name)[:10]
            assert sum(found[-4:]) / 4 < found[0] - 0.1


def _steps(rank: int, world_size: int, mode: str, optimizer_class: type[OneBitOptimizer]) -> dict:
    """Some steps on a model of two layers; rank 1 has a NaN in step 6."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 32), nn.Linear(32, 24))
    ranks = Ranks(rank, world_size, torch.device("cpu"), dist.group.WORLD)
    more = {"local_step_scaler": 3} if optimizer_class is ZeroOneAdam else {}
    optimizer = optimizer_class(model.parameters(), lr=1e-2, **more)
    hook = build_comm_hook(CommConfig(start=2), ranks, optimizer)
    clipping = Clipping(ClipConfig(max_norm=0.5, mode=mode), ranks, model, hook)
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    clipping.attach(replica)
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
    errors = list(hook.local_state().values())
    return {"finite": finite, "weights": weights, "end": everything, "errors": errors}


CASES = [(m, k) for m in ("bucket", "after", "none") for k in (OneBitAdam, ZeroOneAdam)]


def _all_cases(rank: int, world_size: int) -> list[dict]:
    return [_steps(rank, world_size, mode, kind) for mode, kind in CASES]


@pytest.fixture(scope="module")
def both_ranks() -> list[list[dict]]:
    return run_ranks(_all_cases, 2)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{m}-{k.__name__}" for m, k in CASES])
def test_all_ranks_leave_a_step_out_together_and_go_on(both_ranks, number):
    one, other = (results[number] for results in both_ranks)
    assert one["finite"] == other["finite"] == [step != 6 for step in range(11)]
    for step in range(1, 11):
        changed = not torch.equal(one["weights"][step], one["weights"][step - 1])
        assert changed == (step != 6)
        # Intervals of 0/1 Adam: 1 up to step 4, 2 up to 7, then 4. Step 6, in one, is left out.
        alone = CASES[number][1] is ZeroOneAdam and step > 7
        assert torch.equal(one["weights"][step], other["weights"][step]) == (not alone), step
    assert all(torch.equal(a, b) for a, b in zip(one["end"], other["end"], strict=True))
    assert not torch.equal(one["errors"][0], other["errors"][0])
    assert all(error.isfinite().all() for error in (*one["errors"], *other["errors"]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["--growth.name", "stacking"], "optimizer.name: expected another than onebit_adam with g"),
        (["--comm.start", "0"], "comm.start: expected a number >= 1 with optimizer.name onebit_ad"),
    ],
)
def test_settings_that_do_not_go_together(settings, message):
    needed = ["--batching.global_batch_size", "8", "--schedule.total_steps", "3"]
    with pytest.raises(ConfigError, match=message):
        read_config([*needed, *ADAM, *settings])


@pytest.mark.parametrize("world_size", [1, 2])
def test_no_other_comm_hook(world_size):
    optimizer = OneBitAdam([nn.Parameter(torch.zeros(1))])
    ranks = Ranks(0, world_size, torch.device("cpu"), None)
    with pytest.raises(ConfigError, match=r"comm\.hook: expected allreduce with an optimizer that"):
        build_comm_hook(CommConfig(hook="power_sgd"), ranks, optimizer)
