"""Whole runs whose batch grows: its sizes, each example once an epoch, the same bits resumed."""

import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from bert_unpad.pretrain.config import ConfigError, read_config
from tests.support.pretrain_runs import (
    GLOBAL_BATCH,
    log_lines,
    losses,
    make_folder,
    run,
    run_in_turn,
    uses,
)

STEPS = 40
WARMUP = (
    *("--batching.warmup_batch_size", "6", "--batching.warmup_steps", "20"),
    *("--batching.global_batch_size", str(2 * GLOBAL_BATCH), "--batching.accumulation", "2"),
    *("--schedule.epochs", "null", "--schedule.total_steps", str(STEPS)),
    *("--checkpoint.every", "7", "--checkpoint.keep_last", "99"),
)
RUNS = {
    "stratified": [],
    "packed": ["--batching.strategy", "packed"],
    "exchange": ["--batching.strategy", "exchange", "--batching.shuffle_buffer", "32"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("warmup")
    make_folder(path)
    run_in_turn(path, 2, RUNS, WARMUP)
    return path


def _sequences(run_dir: Path) -> list[int]:
    """Sequences of each update."""
    lines = log_lines(run_dir)
    total = [0, *(line["sequences"] for line in lines)]
    return [b - a for a, b in pairwise(total)]


def _cut(folder: Path, name: str, step: int, to: str) -> None:
    """A run as it would be if it had been killed after the checkpoint of a step."""
    shutil.copytree(folder / name, folder / to)
    (folder / to / "summary.json").unlink()
    for checkpoint in (folder / to / "checkpoints").glob("step-*"):
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)


def _check_sizes(run_dir: Path) -> None:
    sizes = _sequences(run_dir)
    grown = [min(6 * (1 + 3 * step // 20), 24) for step in range(STEPS)]
    short = [at for at, (size, full) in enumerate(zip(sizes, grown, strict=True)) if size != full]
    # Only the last update of an epoch has fewer.
    assert len(short) <= max(uses(run_dir)) + 1 < STEPS // 6
    assert all(sizes[at] < grown[at] for at in short)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stratified", "exchange"])
def test_batches_grow_and_use_each_example_once(folder, name):
    _check_sizes(folder / name)
    epochs = uses(folder / name)
    examples = sorted(epochs[0])
    assert len(epochs) > 2
    for epoch in range(max(epochs)):  # the last one is not finished
        assert sorted(epochs[epoch].elements()) == examples


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_bits(folder):
    cuts = {"stratified": 14, "packed": 14, "exchange": 7}
    for name, step in cuts.items():
        _cut(folder, name, step, f"{name}_resumed")
    run_in_turn(folder, 2, {f"{name}_resumed": RUNS[name] for name in cuts}, WARMUP)
    for name in cuts:
        assert losses(folder / f"{name}_resumed") == losses(folder / name)
        assert _sequences(folder / f"{name}_resumed") == _sequences(folder / name)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), [("stratified", 3), ("exchange", 1)])
def test_a_run_goes_on_on_other_ranks(folder, name, ranks):
    to = f"{name}_on_{ranks}"
    _cut(folder, name, 7, to)
    run(folder, to, ranks, *WARMUP, *RUNS[name])
    _check_sizes(folder / to)
    ours, theirs = uses(folder / to), uses(folder / name)
    assert all(ours[epoch] == theirs[epoch] for epoch in range(max(ours)))


BASE = ["--batching.global_batch_size", "24", "--schedule.total_steps", "9"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--batching.warmup_steps", "3"], "warmup_batch_size: expected a number with .*_steps"),
        (["--batching.warmup_batch_size", "6"], "warmup_steps: expected a number with .*_size, "),
        (
            [
                *("--batching.warmup_batch_size", "6", "--batching.warmup_steps", "3"),
                *("--schedule.total_steps", "null", "--schedule.epochs", "1"),
            ],
            "schedule.total_steps: expected a number with batching.warmup_steps",
        ),
        (["--batching.warmup_steps", "0"], "warmup_steps: expected a number >= 1"),
    ],
)
def test_options_that_do_not_fit(given, message):
    with pytest.raises(ConfigError, match=message):
        read_config([*BASE, *given])


@pytest.mark.parametrize(
    ("first", "ranks", "message"),
    [
        (6, 4, r"expected a multiple of the number of ranks \(4\), got 6"),
        (9, 3, r"expected a divisor of the full batch \(24\), got 9"),
        (48, 2, r"expected a divisor of the full batch \(24\), got 48"),
    ],
)
def test_batches_that_do_not_fit_the_ranks(first, ranks, message):
    given = ["--batching.warmup_batch_size", str(first), "--batching.warmup_steps", "3"]
    config, _ = read_config([*BASE, *given])
    with pytest.raises(ConfigError, match=rf"^batching.warmup_batch_size: {message}"):
        config.batching.warmup(ranks)
