"""Runs in 8 bits, whose optimizer keeps the weights rounded: the bits of rounding in every pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bert_unpad.optim.base import FusedOptimizer
from bert_unpad.pretrain import main
from tests.support.pretrain_runs import finish, go_back, losses, make_folder, run_in_turn
from tests.support.processes import start_ranks

pytestmark = pytest.mark.slow

STEPS = 8
BASE = ["--schedule.epochs", "null", "--schedule.total_steps", str(STEPS), "--optimizer.lr", "3e-3"]
BASE += ["--schedule.warmup_share", "0", "--checkpoint.every", "3", "--checkpoint.keep_last", "9"]
BASE += ["--logging.progress", "none", "--logging.examples", "false", "--precision", "fp8"]
BASE += ["--batching.accumulation", "2", "--optimizer.name", "fused_adam"]


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
    run_in_turn(path, 2, {"kept": []}, BASE)
    return path


def test_losses_are_those_of_rounding_in_every_pass(folder):
    command = ["--config", str(folder / "run.yaml"), *BASE, "--run_dir", str(folder / "plain")]
    processes = start_ranks(_main_in_every_pass, 2, command, log=folder / "plain.log")
    codes, output = finish(folder, "plain", processes)
    assert codes == [0, 0], output
    assert losses(folder / "plain") == losses(folder / "kept")
    assert len(losses(folder / "kept")) == STEPS


def test_a_resumed_run_has_the_same_bits(folder):
    go_back(folder, "kept", 3, "resumed")
    run_in_turn(folder, 2, {"resumed": []}, BASE)
    assert losses(folder / "resumed") == losses(folder / "kept")
