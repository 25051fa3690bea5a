"""The figure of `benchmarks.cluster`: seconds of a step on each link, and losses."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from bert_unpad._plots import new_figure, save_figure

LAST = 10  # updates whose mean is drawn


def draw(path: Path, links: list[dict[str, Any]], losses: list[dict[str, Any]]) -> None:
    """Writes the figure.

    Args:
        path: of the figure.
        links: what `measure_link` has found, one or more.
        losses: what `measure_losses` has found; may be empty.
    """
    figure = new_figure(12, 5)
    left, right = figure.subplots(1, 2)
    names = [row["contender"] for row in links[0]["results"]]
    height = 0.8 / len(links)
    for number, link in enumerate(links):
        places = [i + number * height for i in range(len(names))]
        seconds = [row["step_seconds"] for row in link["results"]]
        left.barh(places, seconds, height, label=f"{link['hosts']} hosts, {link['rate']}")
    left.set_yticks([i + 0.4 - height / 2 for i in range(len(names))], names)
    left.invert_yaxis()
    left.set_xlabel("seconds of an update")
    for number, row in enumerate(losses):
        curve = row["training_loss"]
        smooth = [statistics.fmean(curve[max(0, i - LAST + 1) : i + 1]) for i in range(len(curve))]
        style = ("-", "--", ":")[number // 10]  # colours repeat after ten
        steps = range(1, len(smooth) + 1)
        right.plot(steps, smooth, style, label=row["contender"], linewidth=1.1)
    right.set(xlabel="update", ylabel=f"training loss (nats, mean of {LAST} updates and all seeds)")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    save_figure(figure, path)
