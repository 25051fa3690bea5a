"""Whole runs in which each rank reads its own part of the data and ranks exchange examples."""

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from tests.support.pretrain_runs import (
    finish,
    go_on,
    log_lines,
    losses,
    make_folder,
    run,
    start,
    start_pausing,
    uses,
)

pytestmark = pytest.mark.slow

# Without dropout losses depend on the global batches alone, not on which rank trains on what.
EXCHANGE = (
    *("--batching.strategy", "exchange", "--batching.shuffle_buffer", "32"),
    *("--model.hidden_dropout_prob", "0", "--model.attention_probs_dropout_prob", "0"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("exchange")
    make_folder(path)
    run(path, "control", 2, *EXCHANGE)
    return path


def test_each_example_is_used_once_an_epoch(folder):
    epochs = uses(folder / "control")
    assert sorted(epochs) == [0, 1]
    assert set(epochs[0].values()) == {1}
    assert epochs[0] == epochs[1]
    assert sorted(epochs[0]) == list(range(len(epochs[0])))


def test_work_is_shared_and_what_it_costs_is_logged(folder):
    for line in log_lines(folder / "control"):
        assert 0.8 < line["straggler_efficiency"] <= 1
        assert 0.5 < line["measured_efficiency"] <= 1
        assert line["work_variation"] == 0  # of one update
        assert line["data_wait"] >= 0
        assert line["exchange_seconds"] > 0
        assert line["exchange_bytes"] > 0


def test_work_varies_between_the_updates_of_a_line(folder):
    few = ("--schedule.epochs", "null", "--schedule.total_steps", "8", "--logging.every", "4")
    run(folder, "few", 2, *EXCHANGE, *few)
    lines = log_lines(folder / "few")
    assert [line["step"] for line in lines] == [4, 8]
    assert all(0 < line["work_variation"] < 1 for line in lines)


def test_who_trains_on_what_changes_nothing_else(folder):
    """Without an exchange the global batches are the same, and so are masks and losses."""
    run(folder, "unshared", 2, *EXCHANGE, "--batching.scope", "none")
    kept, shared = (log_lines(folder / name) for name in ("unshared", "control"))
    assert all(line["exchange_bytes"] == 0 for line in kept)
    efficiency = [
        sum(line["straggler_efficiency"] for line in lines) / len(lines) for lines in (kept, shared)
    ]
    assert efficiency[0] + 0.02 < efficiency[1]
    ours, theirs = (torch.tensor([line["loss"] for line in lines]) for lines in (kept, shared))
    assert len(ours) > 30
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_stopped_and_resumed(folder):
    """A signal ends all ranks cleanly; the same ranks repeat every bit, others every example."""
    processes = start_pausing(folder, "stopped", 2, 6, *EXCHANGE)
    os.kill(processes[1].pid, signal.SIGTERM)
    go_on(folder / "stopped")
    codes, output = finish(folder, "stopped", processes)
    assert codes == [143, 143], output
    assert 6 <= len(log_lines(folder / "stopped")) <= 8 < len(losses(folder / "control"))
    shutil.copytree(folder / "stopped", folder / "more")
    assert "continuing from" in run(folder, "stopped", 2, *EXCHANGE)
    assert losses(folder / "stopped") == losses(folder / "control")
    assert uses(folder / "stopped") == uses(folder / "control")
    run(folder, "more", 3, *EXCHANGE)
    assert uses(folder / "more") == uses(folder / "control")


def test_a_run_of_another_strategy_is_not_continued(folder):
    shutil.copytree(folder / "control", folder / "other")
    codes, output = finish(folder, "other", start(folder, "other", 1))
    assert codes == [2]
    assert "resume: " in output
