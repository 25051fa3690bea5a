"""Draws the course of a run from its metrics, in one PNG of four panels."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bert_unpad._plots import new_figure, save_figure
from bert_unpad.pretrain.output.metrics import numbers


def draw_run(path: Path, lines: Sequence[dict[str, Any]], most_frequent_rate: float | None) -> None:
    """Draws loss, accuracy, tokens per second, and shares (padding avoided, balance).

    Args:
        path: the PNG to write.
        lines: of metrics.jsonl.
        most_frequent_rate: accuracy of always guessing the most frequent token, for comparison.
    """
    train = [line for line in lines if line.get("kind") == "train"]
    held_out = [line for line in lines if line.get("kind") == "evaluation"]
    figure = new_figure(11, 7)
    (loss, accuracy), (speed, shares) = figure.subplots(2, 2)

    if any(name.endswith("_loss") and name != "mlm_loss" for line in train for name in line):
        _curve(loss, train, "loss", "training: all tasks")
    _curve(loss, train, "mlm_loss", "training: masked tokens")
    _curve(loss, held_out, "mlm_loss", "held out: masked tokens", marker="o")
    loss.set(title="Loss", ylabel="nats")

    _curve(accuracy, train, "mlm_accuracy", "training")
    _curve(accuracy, held_out, "mlm_accuracy", "held out", marker="o")
    if most_frequent_rate is not None:
        accuracy.axhline(most_frequent_rate, color="grey", ls=":", label="most frequent token")
    if any("rtd_accuracy" in line for line in held_out):
        _curve(accuracy, held_out, "rtd_accuracy", "held out: replaced tokens", marker="s")
    accuracy.set(title="Accuracy of masked tokens", ylim=(0, None))

    _curve(speed, train, "tokens_per_second", "real tokens / s")
    speed.set(title="Throughput", ylabel="tokens / s", ylim=(0, None))

    avoided = [
        {"step": line["step"], "avoided": 1 - line["fill"]}
        for line in train
        if numbers([line], "fill")
    ]
    _curve(shares, avoided, "avoided", "padding avoided")
    _curve(shares, train, "straggler_efficiency", "straggler efficiency (mean / max work)")
    _curve(shares, train, "measured_efficiency", "the same by seconds of computing")
    shares.set(title="Shares", ylim=(0, 1.05))

    for axes in (loss, accuracy, speed, shares):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    save_figure(figure, path)


def _curve(axes: Any, lines: Sequence[dict[str, Any]], name: str, label: str, **style: Any) -> None:
    points = [(line["step"], line[name]) for line in lines if numbers([line], name)]
    if points:
        axes.plot(*zip(*points, strict=True), label=label, **style)
