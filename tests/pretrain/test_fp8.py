"""Runs in 8 bits: weights that the optimizer keeps rounded have the bits of rounding in every pass,
and delayed scales are resumed."""

from pathlib import Path

import pytest
import torch

from bert_unpad.optim.base import FusedOptimizer
from bert_unpad.pretrain import main
from bert_unpad.pretrain.config import ConfigError, read_config
from tests.support.pretrain_runs import (
    finish,
    go_back,
    losses,
    make_folder,
    mean_losses,
    run_in_turn,
)
from tests.support.processes import start_ranks

pytestmark = pytest.mark.slow

STEPS = 8
BASE = ["--schedule.epochs", "null", "--schedule.total_steps", str(STEPS), "--optimizer.lr", "3e-3"]
BASE += ["--schedule.warmup_share", "0", "--checkpoint.every", "3", "--checkpoint.keep_last", "9"]
BASE += ["--logging.progress", "none", "--logging.examples", "false", "--precision", "fp8"]
BASE += ["--batching.accumulation", "2", "--optimizer.name", "fused_adam"]
RUNS = {"kept": [], "delayed": ["--amax_history", "3"]}


def _main_in_every_pass(command: list[str]) -> int:
    """A run whose optimizer keeps no weights in 8 bits."""
    keep = FusedOptimizer.keep_rounded

    def keep_16_bits(self, params, dtype) -> None:
        if dtype != torch.float8_e4m3fn:
            keep(self, params, dtype)

    FusedOptimizer.keep_rounded = keep_16_bits
    return main(command)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("fp8")
    make_folder(path)
    run_in_turn(path, 2, RUNS, BASE)
    return path


def test_losses_are_those_of_rounding_in_every_pass(folder):
    command = ["--config", str(folder / "run.yaml"), *BASE, "--run_dir", str(folder / "plain")]
    processes = start_ranks(_main_in_every_pass, 2, command, log=folder / "plain.log")
    codes, output = finish(folder, "plain", processes)
    assert codes == [0, 0], output
    assert losses(folder / "plain") == losses(folder / "kept")
    assert len(losses(folder / "kept")) == STEPS


def test_resumed_runs_have_the_same_bits(folder):
    copies = {go_back(folder, name, 3): more for name, more in RUNS.items()}
    run_in_turn(folder, 2, copies, BASE)
    for name, copy in zip(RUNS, copies, strict=True):
        assert losses(folder / copy) == losses(folder / name)


def test_delayed_scales(folder):
    """The same on all ranks, so that they resume on another number of them; and near the others."""
    delayed, current = (mean_losses(folder / name, STEPS) for name in ("delayed", "kept"))
    assert delayed != current
    assert delayed == pytest.approx(current, rel=0.02)
    copy = go_back(folder, "delayed", 6, "on one rank")
    run_in_turn(folder, 1, {copy: RUNS["delayed"]}, BASE)
    assert mean_losses(folder / copy, STEPS) == pytest.approx(delayed, rel=0.02)


NEEDED = ["--batching.global_batch_size=8", "--schedule.total_steps=10"]


@pytest.mark.parametrize(
    ("more", "error"),
    [
        (["--precision=bf16", "--amax_history=8"], "amax_history: expected null with prec"),
        (["--precision=fp8", "--amax_history=8", "--compile=true"], "amax_history: expected null"),
        (["--precision=fp8", "--amax_history=0"], "amax_history: expected a number >= 1, got 0"),
    ],
)
def test_rules(more, error):
    with pytest.raises(ConfigError, match=error):
        read_config([*NEEDED, *more])
