"""Figures: matplotlib, imported only when one is drawn, and files that appear whole."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bert_unpad._files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["new_figure", "save_figure"]


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of that size in inches; it needs no display.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "plotting needs matplotlib: pip install matplotlib", name="matplotlib"
        ) from error
    # Not pyplot, whose state is global.
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path) -> None:
    """Writes it, in the format of the path's suffix; png without one.

    Raises:
        ValueError: matplotlib cannot write that format.
        OSError: the file cannot be written.
    """
    with replacing(path) as temporary:
        figure.savefig(temporary, format=path.suffix.removeprefix(".") or "png", dpi=120)
