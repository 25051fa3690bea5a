"""The figure of `benchmarks.cluster`: seconds of a step on each link."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bert_unpad._plots import new_figure, save_figure


def draw(path: Path, links: list[dict[str, Any]]) -> None:
    """Writes the figure.

    Args:
        path: of the figure.
        links: what `measure_link` has found, one or more.
    """
    figure = new_figure(7, 5)
    axes = figure.add_subplot(xlabel="seconds of an update")
    names = [row["contender"] for row in links[0]["results"]]
    height = 0.8 / len(links)
    for number, link in enumerate(links):
        places = [i + number * height for i in range(len(names))]
        seconds = [row["step_seconds"] for row in link["results"]]
        axes.barh(places, seconds, height, label=f"{link['hosts']} hosts, {link['rate']}")
    axes.set_yticks([i + 0.4 - height / 2 for i in range(len(names))], names)
    axes.invert_yaxis()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    save_figure(figure, path)
