"""How much less a growing model computes until it is as good: one small encoder, each schedule.

    python -m benchmarks.growth                 # about 20 minutes of a core; no times are taken
    python -m benchmarks.growth --seeds 1 --only full stacking

Trains the ModernBERT of benchmarks.convergence from fresh weights, with every schedule for as many
updates, and evaluates it on held-out text. Compute is what the trainer counts: the operations of
matrix products, forward and backward. It is compared where the masked accuracy passes TARGET, by
interpolation between evaluations, where `full` is as good as a run's end, and at the end. In
`stacking, preserving` new layers add nothing to what passes through them until they have learned:
the weights of their outputs begin at zero.

Runs are kept in --folder and not repeated; the same command continues where it was stopped. After
each run all that is there is written to benchmarks/results/cpu/growth.json and growth.png.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.convergence import FIRST, STEPS, TESTBED
from benchmarks.lib import harness
from benchmarks.lib.training_runs import ROOT, as_arguments, train_here
from bert_unpad._files import replacing
from bert_unpad._plots import new_figure, save_figure
from bert_unpad.nn import EncoderForPreTraining
from bert_unpad.pretrain import stages
from bert_unpad.pretrain.growth.grow import Copies
from bert_unpad.pretrain.output.metrics import read_json_lines

TARGET = 0.3
PRESERVING = "stacking, preserving"
UPDATES = STEPS["start"]
_STACKED = {"name": "stacking", "layers": [1, 2, 4], "shares": [0.4, 0.3, 0.3]}
CONTENDERS: dict[str, dict[str, Any]] = {
    "full": {},
    "stacking": _STACKED,
    PRESERVING: _STACKED,
    "layer drop": {"name": "layer_drop"},
    "mslt": {"name": "mslt", "layers": [2, 4], "shares": [0.5, 0.3], "joint_share": 0.2},
}


@contextmanager
def preserving(really: bool) -> Iterator[None]:
    """Makes new layers begin with outputs of zero."""
    honest = stages.add_layers

    def add_layers(model: EncoderForPreTraining, sources: tuple[int, ...]) -> Copies:
        copies = honest(model, sources)
        for layer in model.bert.encoder.layer[len(model.bert.encoder.layer) - len(sources) :]:
            for weight in (layer.attention.output.dense.weight, layer.output.dense.weight):
                torch.nn.init.zeros_(weight)
                del copies[weight]  # begins with a fresh optimizer state
        return copies

    stages.add_layers = add_layers if really else honest
    try:
        yield
    finally:
        stages.add_layers = honest


def train(name: str, seed: int, folder: Path) -> None:
    """Makes a run, if it is not there, and keeps its curve."""
    path = folder / f"{name}, seed {seed}.json"
    if path.exists():
        return
    run_dir = path.with_suffix("")
    settings = TESTBED | FIRST | {"run_dir": run_dir, "seed": seed}
    settings |= {f"growth.{key}": value for key, value in CONTENDERS[name].items()}
    settings |= {"evaluation.every": 80, "evaluation.examples": 400}
    with preserving(name == PRESERVING):
        if code := train_here(as_arguments(settings)):
            raise SystemExit(f"{name} has failed with code {code}; its message is above")
    lines = read_json_lines(run_dir / "metrics.jsonl")
    flops = {line["step"]: line["flops"] for line in lines if line["kind"] == "train"}
    curve = [
        {"step": x["step"], "flops": flops[x["step"]], "accuracy": x["mlm_accuracy"]}
        | {"loss": x["mlm_loss"]}
        for x in lines
        if x["kind"] == "evaluation"
    ]
    with replacing(path) as temporary:
        temporary.write_text(json.dumps({"contender": name, "seed": seed, "curve": curve}))
    print(f"{name}, seed {seed}: {curve[-1]}", flush=True)


def flops_to(target: float, curve: list[dict[str, Any]]) -> float | None:
    """Operations until a masked accuracy is reached, by interpolation; None where it is not."""
    for before, after in pairwise(curve):
        if before["accuracy"] < target <= after["accuracy"]:
            part = (target - before["accuracy"]) / (after["accuracy"] - before["accuracy"])
            return before["flops"] + part * (after["flops"] - before["flops"])
    return None


def collect(folder: Path) -> list[dict[str, Any]]:
    """All runs that are there, each with what full training with the same seed computes more."""
    runs = [
        json.loads(path.read_text())
        for name in CONTENDERS
        for path in sorted(folder.glob(f"{name}, seed *.json"))
    ]
    full = {run["seed"]: run for run in runs if run["contender"] == "full"}
    for run in runs:
        own, other = run["curve"], full[run["seed"]]["curve"]
        ours, theirs = flops_to(TARGET, own), flops_to(TARGET, other)
        run["cheaper"] = other[-1]["flops"] / own[-1]["flops"]
        run["higher_loss"] = own[-1]["loss"] - other[-1]["loss"]
        run["cheaper_to_target"] = theirs / ours if ours and theirs else None
        as_good = flops_to(own[-1]["accuracy"], other)
        run["cheaper_to_its_end"] = as_good / own[-1]["flops"] if as_good else None
    return runs


def write(folder: Path, command: str) -> None:
    runs = collect(folder)
    payload = {"updates": UPDATES, "target": TARGET, "contenders": CONTENDERS, "runs": runs}
    path = harness.save("growth", "cpu", command, payload)
    figure = new_figure(7, 5)
    axes = figure.add_subplot(xlabel="TFLOP", ylabel="masked tokens of held-out text right")
    for number, name in enumerate(CONTENDERS):
        mine = [run["curve"] for run in runs if run["contender"] == name]
        for curve in mine:
            points = [(x["flops"] / 1e12, x["accuracy"]) for x in curve]
            label = name if curve is mine[0] else None
            axes.plot(*zip(*points, strict=True), f"C{number}.-", label=label, alpha=0.8)
    axes.axhline(TARGET, color="grey", ls=":")
    axes.legend()
    axes.grid(alpha=0.3)
    save_figure(figure, path.with_suffix(".png"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "growth")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for seed in range(options.seeds):
        for name in ("full", *(name for name in options.only if name != "full")):
            train(name, seed, folder)
            write(folder, harness.command())


if __name__ == "__main__":
    main()
