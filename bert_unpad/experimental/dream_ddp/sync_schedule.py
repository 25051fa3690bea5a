"""Which layers are averaged in which update of a period: the schedule of DreamDDP.

A layer's exchange can hide behind the backward passes of the layers that come after it in the
backward pass. Layers are numbered in that order, and times count from the moment when the gradient
of layer 0 is ready, so the time that layer 0 takes does not matter.
"""

from collections.abc import Sequence
from itertools import accumulate


def schedule_layers(
    backward: Sequence[float], exchange: Sequence[float], period: int
) -> list[list[int]]:
    """Divides layers over the updates of a period, so that their exchanges hide.

    Tang et al., "DreamDDP" (2025), arXiv:2502.11058, whose three rules make the search short. An
    update takes consecutive layers. It takes all whose exchanges end before the backward pass does.
    Of the first that does not, both choices are tried: now, and in the next update. An update takes
    at least one layer. The schedule with the least waiting is chosen; of equal ones, the one that
    takes layers earlier. Then the time before an update's own layers is filled with earlier layers,
    as many as can be exchanged in it.

    Updates that get no layers of their own are filled too; the paper does not say what happens in
    them.

    Args:
        backward: seconds of each layer's backward pass, in the order of the backward pass.
        exchange: seconds that averaging each layer's parameters takes.
        period: updates in which every layer is averaged at least once.

    Returns:
        For each update of the period, the layers to average, in ascending order.

    Raises:
        ValueError: there is no layer, lengths differ, or the period is below 1.
    """
    if not backward or len(backward) != len(exchange):
        raise ValueError(
            "backward and exchange: expected a time for each layer, got "
            f"{len(backward)} and {len(exchange)}"
        )
    if period < 1:
        raise ValueError(f"period: expected a number >= 1, got {period}")
    ready = list(accumulate(backward[1:], initial=0.0))
    runs = _best_runs(ready, exchange, period)
    return [[*_fill(ready, exchange, first), *range(first, last)] for first, last in runs]


def _best_runs(
    ready: Sequence[float], exchange: Sequence[float], period: int
) -> list[tuple[int, int]]:
    """The first layer, and the one after the last, of each update's own run of layers."""
    count = len(ready)
    hidden = [_hidden(ready, exchange, first) for first in range(count)]
    # By first layer: the waiting if the update also takes the first layer that does not hide.
    one_more = [
        _waiting(ready, exchange, first, min(end + 1, count)) for first, end in enumerate(hidden)
    ]
    # With one update left, then with two, ...: by first layer, the waiting and the run's end.
    best = [[(_waiting(ready, exchange, first, count), count) for first in range(count + 1)]]
    for _ in range(period - 1):
        rest, level = best[-1], []
        for first, end in enumerate(hidden):
            taken = min(end + 1, count)
            now = (one_more[first] + rest[taken][0], taken)
            later = (rest[end][0], end)
            level.append(later if end > first and later[0] < now[0] else now)
        best.append([*level, (0.0, count)])
    runs, first = [], 0
    for level in reversed(best):
        runs.append((first, level[first][1]))
        first = level[first][1]
    return runs


def _hidden(ready: Sequence[float], exchange: Sequence[float], first: int) -> int:
    """The first layer, counted from `first`, whose exchange ends after the backward pass."""
    free = ready[first]  # when the link is free again
    for layer in range(first, len(ready)):
        free = max(free, ready[layer]) + exchange[layer]
        if free > ready[-1]:
            return layer
    return len(ready)


def _waiting(ready: Sequence[float], exchange: Sequence[float], first: int, last: int) -> float:
    """Seconds from the end of the backward pass to that of the exchanges of first .. last - 1."""
    free = 0.0
    for layer in range(first, last):
        free = max(free, ready[layer]) + exchange[layer]
    return max(free - ready[-1], 0.0)


def _fill(ready: Sequence[float], exchange: Sequence[float], first: int) -> list[int]:
    """Layers from 0 on whose exchanges end before layer `first` is ready, or the backward pass."""
    limit = ready[min(first, len(ready) - 1)]
    free, filled = 0.0, []
    for layer in range(first):
        free = max(free, ready[layer]) + exchange[layer]
        if free > limit:
            break
        filled.append(layer)
    return filled
