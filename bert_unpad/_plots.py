"""Figures with matplotlib, which is imported only when a figure is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bert_unpad._files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Positions of a label around its point: (x, y) as directions, and the alignment of the text.
_PLACES = [
    (x, y, {-1: "right", 0: "center", 1: "left"}[x], {-1: "top", 0: "center", 1: "bottom"}[y])
    for x, y in ((0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1), (1, 0), (-1, 0))
]


def new_figure(width: float, height: float) -> Figure:
    """Makes an empty figure with a size in inches; it needs no display.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "plotting needs matplotlib: pip install matplotlib", name="matplotlib"
        ) from error
    # Not pyplot, which has global state.
    return Figure(figsize=(width, height), layout="constrained")


def label_points(axes: Axes, points: Sequence[tuple[float, float]], labels: Sequence[str]) -> None:
    """Writes a label next to each point, without covering a line, point, legend or other label.

    A label without space in the frame is left out; earlier labels have priority. Call this after
    drawing everything else and setting the limits.
    """
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    figure.draw_without_rendering()  # computes the layout
    frame = axes.get_window_extent()
    paths = [line.get_path().transformed(line.get_transform()) for line in axes.lines]
    marker = 4 * figure.dpi / 72
    taken = [
        Bbox.from_bounds(x - marker, y - marker, 2 * marker, 2 * marker)
        for x, y in axes.transData.transform(points)
    ]
    legend = axes.get_legend()
    if legend is not None:
        taken.append(legend.get_window_extent())
    for point, label in zip(points, labels, strict=True):
        note = axes.annotate(label, point, xytext=(0, 0), textcoords="offset points")
        for x, y, horizontal, vertical in _PLACES:
            note.set(position=(6 * x, 6 * y), ha=horizontal, va=vertical)
            box = note.get_window_extent()
            free = frame.containsx(box.x0) and frame.containsx(box.x1)
            free = free and frame.containsy(box.y0) and frame.containsy(box.y1)
            free = free and not any(path.intersects_bbox(box, filled=False) for path in paths)
            if free and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
        else:
            note.remove()


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a figure in the format of the path's suffix, or as png without a suffix.

    Raises:
        ValueError: matplotlib cannot write this format.
        OSError: the file cannot be written.
    """
    with replacing(path) as temporary:
        figure.savefig(temporary, format=path.suffix.removeprefix(".") or "png", dpi=120)
