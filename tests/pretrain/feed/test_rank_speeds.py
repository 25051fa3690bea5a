"""Ranks of unequal speed: the same training, other shares of work; speeds measured and kept."""

import shutil
from datetime import timedelta
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from torch import nn

from bert_unpad.pretrain.config import ConfigError, read_config
from bert_unpad.pretrain.feed.rank_speeds import RankSpeeds
from bert_unpad.pretrain.gradients.compute_clock import ComputeClock, span_seconds
from bert_unpad.pretrain.output.metrics import read_json_lines
from bert_unpad.pretrain.ranks import Ranks
from tests.support.pretrain_runs import log_lines, losses, make_folder, run_in_turn, uses

CPU = torch.device("cpu")

# Without dropout losses depend on the global batches alone, not on which rank trains on what.
BASE = ["--model.hidden_dropout_prob", "0", "--model.attention_probs_dropout_prob", "0"]
BASE += ["--logging.progress", "none", "--batching.shuffle_buffer", "32"]
UNEQUAL, AUTO = (["--batching.rank_speeds", value] for value in ("[3.0,1.0]", "auto"))
RUNS = {"alike": [], "unequal": UNEQUAL, "auto": AUTO}
STRATEGIES = {
    "stratified": ["--batching.strategy", "stratified"],
    "random": ["--batching.strategy", "random", "--batching.accumulation", "2"],
    "packed": ["--batching.strategy", "packed", "--batching.global_batch_size", "6"],
    "exchange": ["--batching.strategy", "exchange"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("speeds")
    make_folder(path)
    runs = {
        f"{strategy}-{name}": [*arguments, *options]
        for strategy, arguments in STRATEGIES.items()
        for name, options in RUNS.items()
    }
    runs["stratified-alike"] += ["--batching.rank_speeds", "[1, 1]"]  # the same global batches
    run_in_turn(path, 2, runs, BASE)
    return path


def _curve(run_dir: Path) -> torch.Tensor:
    return torch.tensor([values[:3] for values in losses(run_dir).values()])


def _sequences(run_dir: Path) -> list[int]:
    """Examples of each rank over the whole run."""
    ranks = sorted(run_dir.glob("examples.rank*.jsonl"))
    return [sum(len(x["examples"]) for x in read_json_lines(path)) for path in ranks]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unequal", "auto"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_is_the_same_to_rounding(folder, strategy, name):
    ours, theirs = (_curve(folder / f"{strategy}-{x}") for x in (name, "alike"))
    assert len(ours) > 10
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=0)
    for counter in uses(folder / f"{strategy}-{name}").values():
        assert set(counter.values()) == {1}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_faster_rank_gets_more(folder, strategy):
    fast, slow = _sequences(folder / f"{strategy}-unequal")
    assert 2 < fast / slow < 4.5
    lines = log_lines(folder / f"{strategy}-unequal")
    # Of single updates less: six rows that are packed do not divide 3 to 1.
    assert fmean(line["straggler_efficiency"] for line in lines) > 0.65


@pytest.mark.slow
def test_measured_speeds_are_logged_and_go_on_where_they_were(folder):
    found = log_lines(folder / "stratified-auto", "rank_speeds")
    assert found[0]["step"] == 6
    for line in found:
        assert len(line["speeds"]) == 2
        assert min(line["speeds"]) > 0
        assert sum(line["speeds"]) == pytest.approx(2, rel=0.01)


@pytest.mark.slow
def test_a_resumed_run_repeats_its_bits(folder):
    """With given speeds; measured ones are never the same twice."""
    shutil.copytree(folder / "stratified-unequal", folder / "resumed")
    steps = sorted((folder / "resumed" / "checkpoints").glob("step-*"))
    assert len(steps) > 1
    shutil.rmtree(steps[-1])
    run_in_turn(folder, 2, {"resumed": [*STRATEGIES["stratified"], *UNEQUAL]}, BASE)
    assert losses(folder / "resumed") == losses(folder / "stratified-unequal")


class _Pair(Ranks):
    """Two ranks, of which the other one says what it is told to."""

    other = 0.0

    def gather(self, value: float) -> list[float]:
        return [value, self.other]

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def _pair(saved: list[float], setting="auto") -> tuple[RankSpeeds, _Pair]:
    ranks = _Pair(0, 2, CPU, None, 2, timedelta(seconds=1))
    return RankSpeeds(setting, ranks, saved), ranks


def _updates(speeds: RankSpeeds, count: int, work: float, seconds: float) -> list[bool]:
    return [speeds.add_update(work, [(0.0, seconds)]) for _ in range(count)]


def test_speeds_settle_where_all_ranks_take_equally_long():
    """Rank 0 takes 1 s and 1 s for each unit of work, rank 1 twice that; 12 units a step."""
    speeds, ranks = _pair([])
    for _ in range(12):
        work = 12 * speeds.values / speeds.values.sum()
        times = (1 + work) * [1, 2]
        object.__setattr__(ranks, "other", work[1] / times[1])
        _updates(speeds, 24, work[0], times[0])
    # 1 + w = 2 (1 + 12 - w)
    np.testing.assert_allclose(work, [25 / 3, 11 / 3], rtol=2e-2)
    np.testing.assert_allclose(times[0], times[1], rtol=3e-2)


def test_first_measurement_counts_alone_and_leaves_the_first_updates_out():
    speeds, ranks = _pair([])
    object.__setattr__(ranks, "other", 2.0)
    assert _updates(speeds, 2, 1.0, 100.0) + _updates(speeds, 4, 1.0, 0.25) == [*[False] * 5, True]
    np.testing.assert_allclose(speeds.values, [4 / 3, 2 / 3], rtol=6e-3)
    object.__setattr__(ranks, "other", 4.0)
    assert _updates(speeds, 24, 1.0, 0.25)[-1]
    np.testing.assert_allclose(speeds.values[0] / speeds.values[1], 2**0.5, rtol=1.2e-2)


def test_a_rank_without_examples_gets_some_again():
    speeds, ranks = _pair([])
    speeds.values = np.array([1.9, 0.1])
    object.__setattr__(ranks, "other", 0.0)
    assert _updates(speeds, 6, 1.0, 0.1)[-1]
    np.testing.assert_allclose(speeds.values, [1.0, 1.0])
    assert not _updates(speeds, 24, 0.0, 0.1)[-1]


def test_a_list_must_fit_one_rank_too():
    ranks = Ranks(0, 1, CPU, None)
    with pytest.raises(ConfigError, match="expected a number for each of 1 ranks, got 2"):
        RankSpeeds([1.0, 2.0], ranks, [])


def test_what_was_saved_counts_for_as_many_ranks():
    speeds, ranks = _pair([1.5, 0.5])
    assert speeds.values.tolist() == [1.5, 0.5]
    object.__setattr__(ranks, "other", 1.0)
    assert _updates(speeds, 6, 1.0, 1.0)[-1]  # both alike, half of which is believed
    np.testing.assert_allclose(speeds.values[0] / speeds.values[1], 3**0.5, rtol=1.2e-2)
    assert _pair([1.0, 1.0, 1.0])[0].values.tolist() == [1.0, 1.0]


def test_given_speeds_are_not_measured():
    speeds, _ = _pair([], [2.0, 1.0])
    assert not any(_updates(speeds, 50, 1.0, 1.0))
    assert speeds.values.tolist() == [2.0, 1.0]
    with pytest.raises(ConfigError, match="rank_speeds: expected a number for each of 2 ranks"):
        _pair([], [1.0])


def test_the_clock_counts_its_spans_to_the_last_gradient():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    clock = ComputeClock(CPU)
    clock.watch(model)
    moments = iter([1.0, 2.0, 10.0, 11.0, 12.0, 13.0, 99.0, 100.0])
    clock._now = lambda: next(moments)
    clock.start()
    clock.start()  # in a span already
    clock.stop()
    clock.stop()
    clock.start()
    model(torch.ones(3)).sum().backward()  # of four parameters, at 11 to 13 and 99
    clock.stop(at_gradients=True)
    assert span_seconds(clock.take()) == 1.0 + 89.0
    assert clock.take() == []


def test_a_clock_that_is_off_measures_nothing():
    clock = ComputeClock(CPU, enabled=False)
    model = nn.Linear(2, 2)
    clock.watch(model)
    clock.start()
    model(torch.ones(2)).sum().backward()
    clock.stop()
    assert clock.take() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["[1.0, 0.0]"],
            "batching.rank_speeds: expected numbers in 0.001 .. 1000, or auto, got 0.0",
        ),
        (["[1.0, 2e3]"], "batching.rank_speeds: expected numbers in 0.001 .. 1000"),
        (["fast"], "batching.rank_speeds: expected a list of numbers or one of auto or null"),
        (["auto", "--cuda_graphs", "true"], "cuda_graphs: expected false"),
        (
            ["auto", "--batching.strategy", "exchange", "--batching.scope", "none"],
            "batching.scope: expected node, world or two_level",
        ),
    ],
)
def test_what_does_not_fit_is_named(options, message):
    base = ["--schedule.total_steps", "5", "--batching.global_batch_size", "4"]
    with pytest.raises(ConfigError, match=message):
        read_config([*base, "--batching.rank_speeds", *options])
