"""When one step computes its backward pass and when gradients travel, from torch.profiler.

Communication over gloo is recorded from the call that hands a bucket over to the moment that its
work is done, so buckets that wait for each other overlap in the picture as they do in time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from bert_unpad._plots import new_figure, save_figure

__all__ = ["draw", "record"]

Intervals = list[tuple[float, float]]
# Names of the profiler's events, by what they show.
_PREFIXES = {"backward": "autograd::engine::evaluate_function", "communication": "gloo:all_reduce"}


def record(step: Callable[[], object]) -> dict[str, Intervals]:
    """(begin, end) of the backward pass's nodes and of every allreduce, in seconds from the start.

    Args:
        step: one training step; its warm-up is the caller's.
    """
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    events = profiler.events()
    start = min(event.time_range.start for event in events)
    return {
        kind: [
            ((event.time_range.start - start) / 1e6, (event.time_range.end - start) / 1e6)
            for event in events
            if event.name.startswith(prefix)
        ]
        for kind, prefix in _PREFIXES.items()
    }


def draw(path: Path, timelines: Mapping[str, Mapping[str, Intervals]], link: str) -> None:
    """Two lanes for each way of clipping: backward pass above, communication below."""
    figure = new_figure(9, 1 + 0.8 * len(timelines))
    axes = figure.add_subplot(xlabel=f"seconds of one step of rank 0, link of {link}")
    colours = {"backward": "C0", "communication": "C3"}
    ticks = {}
    for row, (name, lanes) in enumerate(timelines.items()):
        for lane, (kind, intervals) in enumerate(lanes.items()):
            place = -row - 0.4 * lane
            bars = [(begin, end - begin) for begin, end in intervals]
            # Buckets on their way side by side: see-through, so that their number shows.
            axes.broken_barh(
                bars,
                (place - 0.18, 0.36),
                color=colours[kind],
                alpha=0.8 if kind == "backward" else 0.35,
                label=kind if row == 0 else None,
            )
        ticks[-row - 0.2] = name
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.legend(loc="lower right")
    save_figure(figure, path)
