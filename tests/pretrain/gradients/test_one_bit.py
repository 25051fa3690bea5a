"""Runs whose ranks exchange one bit a value: warm-up, resuming, steps left out, bad settings."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from bert_unpad.experimental import ZeroOneAdam
from bert_unpad.optim import OneBitAdam
from bert_unpad.pretrain.config import CommConfig, ConfigError, read_config
from bert_unpad.pretrain.gradients.comm_hooks import build_comm_hook
from bert_unpad.pretrain.ranks import Ranks
from tests.support.ddp_steps import ddp_steps
from tests.support.pretrain_runs import go_back, losses, make_folder, mean_losses, run_in_turn
from tests.support.processes import run_ranks

pytestmark = pytest.mark.slow

STEPS, START = 20, 6
BASE = ["--schedule.epochs", "null", "--schedule.total_steps", str(STEPS), "--optimizer.lr", "3e-3"]
BASE += ["--checkpoint.keep_last", "9", "--checkpoint.every", "5", "--comm.start", str(START)]
BASE += ["--logging.examples", "false", "--logging.progress", "none"]
# What has hardly a gradient, as biases of keys, moves by lr * scale / eps: much in a tiny model.
BASE += ["--optimizer.eps", "1e-3"]
ADAM, LAMB, ZERO_ONE = (
    ["--optimizer.name", name] for name in ("onebit_adam", "onebit_lamb", "zero_one_adam")
)
LAMB += ["--optimizer.lr", "0.02"]
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


@pytest.mark.parametrize("name", RUNS)
def test_every_run_learns(folder, name):
    found = mean_losses(folder / name, STEPS)
    assert sum(found[-4:]) / 4 < found[0] - 0.1


def test_the_warm_up_is_adam(folder):
    assert losses(folder / "averaged") == losses(folder / "fused")
    plain, found = mean_losses(folder / "fused", STEPS), mean_losses(folder / "adam", STEPS)
    assert found[: START + 1] == plain[: START + 1]
    assert found[START + 1 :] != plain[START + 1 :]


def test_a_resumed_run_goes_on_as_one_without_interruption(folder):
    """From the warm-up, from the middle, and from within an interval of 0/1 Adam."""
    points = [("lamb", 5), *((name, 10) for name in RUNS), ("zero one", 15)]
    again = {go_back(folder, name, step): name for name, step in points}
    run_in_turn(folder, 2, {copy: RUNS[name] for copy, name in again.items()}, BASE)
    for copy, name in again.items():
        assert losses(folder / copy) == losses(folder / name), copy


def test_other_numbers_of_ranks_go_on(folder):
    for ranks in (1, 3):
        copies = {
            go_back(folder, name, 10, f"{name} on {ranks}"): name
            for name in ("adam", "lamb", "zero one")
        }
        run_in_turn(folder, ranks, {copy: RUNS[name] for copy, name in copies.items()}, BASE)
        for copy, name in copies.items():
            found = mean_losses(folder / copy, STEPS)
            assert found[:10] == mean_losses(folder / name, STEPS)[:10]
            assert sum(found[-4:]) / 4 < found[0] - 0.1
            assert sum(found[-4:]) < sum(found[6:10]), copy


CASES = [(m, k) for m in ("bucket", "after", "none") for k in (OneBitAdam, ZeroOneAdam)]


def _all_cases(rank: int, world_size: int) -> list[dict]:
    found = []
    for mode, kind in CASES:
        # A weight whose variance happens to be tiny goes far by a bit of the common size.
        options = {"lr": 1e-2, "eps": 1e-3}
        options |= {"local_step_scaler": 3} if kind is ZeroOneAdam else {}
        more = {"steps": 11, "nan_step": 6, "make_optimizer": partial(kind, **options)}
        found.append(ddp_steps(rank, world_size, CommConfig(start=2), mode, **more))
    return found


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
    assert not torch.equal(one["local"][0], other["local"][0])
    assert all(error.isfinite().all() for error in (*one["local"], *other["local"]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["--growth.name", "stacking"],
            "optimizer.name: .* than .* onebit_adam, .* with growth",
        ),
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
