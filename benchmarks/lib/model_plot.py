"""Draws the model benchmark on a GPU: a bar for each contender's step, of its kernel families."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.lib.kernel_families import FAMILIES
from bert_unpad._plots import new_figure, save_figure

__all__ = ["draw"]


def draw(path: Path, report: Mapping[str, Any]) -> None:
    """Contenders without a profile are left out.

    Args:
        path: of the PNG file.
        report: of `benchmarks.lib.model_gpu`.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib import colormaps

    rows = [row for row in report["results"] if "families" in row["kernels"]]
    figure = new_figure(10, 1.6 + 0.45 * len(rows))
    axes = figure.add_subplot(xlabel="milliseconds of a step")
    colours = dict(zip(FAMILIES, colormaps["tab20"].colors, strict=False))
    for place, row in enumerate(reversed(rows)):
        kernels = row["kernels"]
        # Where kernels run side by side they add up to more than the time they take together.
        scale = kernels["busy_ms"] / kernels["kernel_ms"]
        left = 0.0
        for kind, spent in kernels["families"].items():
            width = spent["ms"] * scale
            axes.barh(place, width, left=left, color=colours[kind])
            left += width
        axes.barh(place, kernels["idle_ms"], left=left, color="white", edgecolor="grey")
    axes.set_yticks(range(len(rows)), [row["contender"] for row in reversed(rows)])
    seen = [kind for kind in FAMILIES if any(kind in r["kernels"]["families"] for r in rows)]
    handles = [axes.barh(0, 0, color=colours[kind]) for kind in seen]
    handles.append(axes.barh(0, 0, color="white", edgecolor="grey"))
    figure.legend(handles, [*seen, "idle"], loc="outside lower center", ncols=5, fontsize=8)
    save_figure(figure, path)
