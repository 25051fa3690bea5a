"""Draws time against cost, a point per number of nodes; matplotlib is imported only to draw."""

from collections.abc import Sequence
from pathlib import Path

from bert_unpad._plots import label_points, new_figure, save_figure
from bert_unpad.plan.choose import Choice


def plot_curve(choices: Sequence[Choice], title: str, path: Path) -> None:
    """Draws days against cost, or against nodes where there is no price.

    Args:
        choices: at least one, in the order of nodes.
        title: over the plot.
        path: the image to write; its suffix selects the format (png, pdf, svg).

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: matplotlib cannot write that format.
        OSError: the file cannot be written.
    """
    costs = [choice.cost for choice in choices if choice.cost is not None]
    days = [choice.days for choice in choices]
    nodes = [choice.candidate.nodes for choice in choices]
    across: Sequence[float] = costs or nodes
    figure = new_figure(7, 4.5)
    axes = figure.subplots()
    axes.plot(across, days, color="0.7", zorder=1)
    for kind in dict.fromkeys(choice.bottleneck for choice in choices):
        chosen = [i for i, choice in enumerate(choices) if choice.bottleneck == kind]
        axes.scatter([across[i] for i in chosen], [days[i] for i in chosen], label=kind, zorder=2)
    axes.set_title(title)
    axes.set_xlabel("cost of the run (in the currency of --price)" if costs else "nodes")
    axes.set_ylabel("days")
    axes.margins(x=0.15)
    axes.set_ylim(0, 1.15 * max(days))
    axes.grid(alpha=0.3)
    axes.legend(title="bottleneck")
    fastest = min(range(len(days)), key=days.__getitem__)
    order = list(dict.fromkeys([fastest, 0, len(days) - 1, *range(len(days))]))
    label_points(
        axes,
        [(across[i], days[i]) for i in order],
        [f"{nodes[i]} node{'s' * (nodes[i] > 1)}" for i in order],
    )
    save_figure(figure, path)
