"""The schedule of layer-wise averages, against the paper's search written as a recursion."""

import random

import pytest

from bert_unpad.experimental.dream_ddp.sync_schedule import schedule_layers
from tests.support.seeds import derived


def _end(layers: list[int], ready: list[float], exchange: list[float]) -> float:
    """When the exchanges of some layers, one after the other, have ended."""
    free = 0.0
    for layer in layers:
        free = max(free, ready[layer]) + exchange[layer]
    return free


def _search(
    first: int, updates: int, ready: list[float], exchange: list[float]
) -> tuple[float, list[list[int]]]:
    """The least waiting for the layers from `first` on in so many updates, and their layers."""
    rest = list(range(first, len(ready)))
    if not rest:
        return 0.0, [[]] * updates
    waiting = max(_end(rest, ready, exchange) - ready[-1], 0.0)
    if updates == 1 or not waiting:
        return waiting, [rest] + [[]] * (updates - 1)
    hidden = []
    while _end([*hidden, rest[len(hidden)]], ready, exchange) <= ready[-1]:
        hidden.append(rest[len(hidden)])
    now = [*hidden, rest[len(hidden)]]
    seconds, others = _search(now[-1] + 1, updates - 1, ready, exchange)
    seconds += _end(now, ready, exchange) - ready[-1]
    if hidden:
        later, later_others = _search(now[-1], updates - 1, ready, exchange)
        if later < seconds:
            return later, [hidden, *later_others]
    return seconds, [now, *others]


@pytest.mark.parametrize("seed", range(60))
def test_runs_are_those_of_the_papers_search_and_bubbles_are_full(seed):
    draw = random.Random(derived(seed))
    count, period = draw.randint(1, 9), draw.randint(1, 6)
    # Multiples of 1/8, so that sums are exact and ties real.
    backward = [draw.randint(0, 16) / 8 for _ in range(count)]
    exchange = [draw.randint(0, draw.choice([4, 16, 60])) / 8 for _ in range(count)]
    ready = [sum(backward[1 : layer + 1]) for layer in range(count)]
    found = schedule_layers(backward, exchange, period)
    _, runs = _search(0, period, ready, exchange)
    assert len(found) == period
    for layers, run in zip(found, runs, strict=True):
        assert layers[len(layers) - len(run) :] == run
        filled = layers[: len(layers) - len(run)]
        limit = ready[run[0]] if run else ready[-1]
        assert filled == list(range(len(filled)))
        assert _end(filled, ready, exchange) <= limit
        free = run[0] if run else count
        if len(filled) < free:
            assert _end([*filled, len(filled)], ready, exchange) > limit
    assert sorted({layer for layers in found for layer in layers}) == list(range(count))


def test_fast_and_slow_links():
    backward = [1.0] * 6
    assert schedule_layers(backward, [0.0] * 6, 3) == [[0, 1, 2, 3, 4, 5]] * 3
    assert schedule_layers(backward, [100.0] * 6, 3) == [[0], [1], [2, 3, 4, 5]]
    assert schedule_layers(backward, [100.0] * 6, 8) == [[0], [1], [2], [3], [4], [5], [], []]
    # In the last update the link is free until layer 3 is ready, long enough for layer 0.
    assert schedule_layers(backward, [3.0] * 6, 3) == [[0, 1], [2], [0, 3, 4, 5]]


def test_times_that_make_no_schedule():
    with pytest.raises(ValueError, match="backward and exchange: expected a time for each layer"):
        schedule_layers([1.0], [], 2)
    with pytest.raises(ValueError, match="backward and exchange: expected a time for each layer"):
        schedule_layers([], [], 2)
    with pytest.raises(ValueError, match="period: expected a number >= 1, got 0"):
        schedule_layers([1.0], [1.0], 0)
