"""Draws the efficiency of simulated epochs; matplotlib is imported only when that is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bert_unpad._files import replacing
from bert_unpad.simulate.epoch import SimulationResult

__all__ = ["plot_efficiency"]


def plot_efficiency(results: Sequence[SimulationResult], path: Path) -> None:
    """Draws, for every result, which share of the steps has at most a given efficiency.

    Args:
        results: at least one.
        path: the image to write; its suffix selects the format (png, pdf, svg).

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: matplotlib cannot write that format.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "plotting needs matplotlib: pip install matplotlib", name="matplotlib"
        ) from error
    # A bare Figure draws without a display and leaves pyplot's global state alone.
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for result in results:
        axes.step(
            np.sort(result.per_step),
            np.arange(1, result.steps + 1) / result.steps,
            where="post",
            label=f"{result.strategy}: mean {result.efficiency:.4f}",
        )
    ranks, batch, samples = results[0].ranks, results[0].batch, results[0].samples
    axes.set_title(f"{ranks:,} ranks x {batch}, {samples:,} examples")
    axes.set_xlabel("straggler efficiency (mean work / greatest work of a rank)")
    axes.set_ylabel("share of steps at or below")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    with replacing(path) as temporary:
        figure.savefig(temporary, format=path.suffix.removeprefix(".") or "png", dpi=150)
