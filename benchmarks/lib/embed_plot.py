"""Draws the embedding benchmark: each contender's texts a second, in times stock PyTorch's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.embed_contenders import CONTENDERS, NOT_EXACT, TORCH
from bert_unpad._plots import new_figure, save_figure

HEIGHT = 0.8  # of a group of bars


def draw(path: Path, cells: Sequence[Mapping[str, Any]]) -> None:
    """Writes a PNG file with a group of bars for each cell.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = new_figure(9, 1.5 + 1.1 * len(cells))
    axes = figure.add_subplot(xlabel="texts a second, in times those of the torch backend")
    colours = {name: f"C{number}" for number, name in enumerate(CONTENDERS)}
    bars = {}
    for row, cell in enumerate(cells):
        rates = {x["contender"]: x["texts_per_second"] for x in cell["results"]}
        stock = rates.pop(TORCH)
        thin = HEIGHT / len(rates)
        for place, (name, rate) in enumerate(rates.items()):
            y = row + (place - len(rates) / 2 + 0.5) * thin
            bars[name] = axes.barh(y, rate / stock, thin, color=colours[name])
            axes.bar_label(bars[name], fmt="%.2f", padding=2, fontsize=7)
    axes.axvline(1, color="grey", lw=0.8)
    labels = [f"{cell['shape']}\n{cell['lengths']}, {cell['texts']} texts" for cell in cells]
    axes.set_yticks(range(len(cells)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.08)
    said = [f"{name} (not exact)" if name in NOT_EXACT else name for name in bars]
    figure.legend(bars.values(), said, loc="outside lower center", ncols=3, fontsize=8)
    save_figure(figure, path)
