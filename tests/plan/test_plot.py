"""The picture of a plan can be read."""

import itertools
import math
from types import SimpleNamespace

import pytest

pytest.importorskip("matplotlib")

from bert_unpad.plan import plot

# (nodes, cost, days)
CURVES = {
    "the README's": [(1, 575, 1.2), (2, 864, 0.9), (4, 2165, 1.13), (8, 4801, 1.25)],
    "one": [(1, 575, 1.2)],
    "falling": [(n, 500 + 10 * n, 8 / n) for n in range(1, 9)],
    "rising": [(n, 100 * n, n / 10) for n in range(1, 6)],
    "crowded": [(n, 500 + n, 1 + 0.1 * math.sin(n)) for n in range(1, 200)],
    "without a price": [(n, None, 3 / n) for n in range(1, 9)],
}


@pytest.mark.parametrize("name", CURVES)
def test_labels_cover_nothing_and_stay_in_the_frame(name, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plot, "save_figure", lambda figure, path: drawn.append(figure))
    choices = [
        SimpleNamespace(
            cost=cost,
            days=days,
            candidate=SimpleNamespace(nodes=nodes),
            bottleneck="compute" if nodes < 4 else "network",
        )
        for nodes, cost, days in CURVES[name]
    ]
    plot.plot_curve(choices, "a title", tmp_path / "plan.png")
    (figure,) = drawn
    figure.draw_without_rendering()
    (axes,) = figure.axes
    priced = choices[0].cost is not None
    assert axes.get_xlabel() == (
        "cost of the run (in the currency of --price)" if priced else "nodes"
    )
    labels = {text.get_text(): text.get_window_extent() for text in axes.texts}
    if name == "crowded":
        assert 3 <= len(labels) < len(choices)
    elif name != "falling":
        assert len(labels) == len(choices)
    fastest = min(choices, key=lambda choice: choice.days).candidate.nodes
    assert f"{fastest} node{'s' * (fastest > 1)}" in labels
    frame = axes.get_window_extent()
    (line,) = axes.lines
    path = line.get_path().transformed(line.get_transform())
    points = line.get_transform().transform(line.get_xydata())
    for box in labels.values():
        assert frame.x0 <= box.x0 < box.x1 <= frame.x1
        assert frame.y0 <= box.y0 < box.y1 <= frame.y1
        assert not path.intersects_bbox(box, filled=False)
        assert not box.overlaps(axes.get_legend().get_window_extent())
        assert not any(box.contains(*point) for point in points)
    for one, other in itertools.combinations(labels.values(), 2):
        assert not one.overlaps(other)
