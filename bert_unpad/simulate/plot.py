"""Draws simulated epochs and their scaling; matplotlib is imported only to draw."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bert_unpad._plots import new_figure, save_figure
from bert_unpad.simulate.epoch import SimulationResult


def plot_results(
    results: Sequence[SimulationResult], curve: Sequence[SimulationResult], path: Path
) -> None:
    """Draws the share of steps at or below each efficiency, and the scaling curve.

    Args:
        results: at least one.
        curve: what `scaling_curve` returned; empty to leave it out.
        path: the image to write; its suffix selects the format (png, pdf, svg).

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: matplotlib cannot write that format.
        OSError: the file cannot be written.
    """
    panels = 2 if curve else 1
    figure = new_figure(7 * panels, 4)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    _draw_steps(axes[0], results)
    if curve:
        _draw_scaling(axes[1], curve)
    save_figure(figure, path)


def _draw_steps(axes, results: Sequence[SimulationResult]) -> None:
    for result in results:
        axes.step(
            np.sort(result.per_step),
            np.arange(1, result.steps + 1) / result.steps,
            where="post",
            label=f"{result.strategy}: mean {result.efficiency:.4f}",
        )
    axes.set_title(f"{results[0].ranks:,} ranks x {results[0].batch}")
    axes.set_xlabel("straggler efficiency (mean work / greatest work of a rank)")
    axes.set_ylabel("share of steps at or below")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")


def _draw_scaling(axes, curve: Sequence[SimulationResult]) -> None:
    for strategy in dict.fromkeys(result.strategy for result in curve):
        points = [result for result in curve if result.strategy == strategy]
        axes.plot(
            [point.ranks for point in points],
            [point.step_time.scaling_efficiency for point in points],
            marker="o",
            label=strategy,
        )
    axes.set_title(f"projected, {curve[0].batch} examples per rank and step")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("ranks")
    axes.set_ylabel("throughput relative to ranks that never wait")
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left")
