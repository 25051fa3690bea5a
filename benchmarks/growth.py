"""What schedules of growth cost and where they end: one small model of 12 layers, in one table.

    python -m benchmarks.growth                                # 1 seed
    python -m benchmarks.growth --seeds 3 --steps 600

Trains a model of 12 layers on the quickstart text, with each schedule and seed, on one process of
one thread. What an update of each stage costs is measured apart (benchmarks/lib/growth_cost.py),
with all stages taking turns: seconds of CPU time, bytes of gradients that a rank sends, and memory.
The cost of a run is that of its updates. Both are kept in --folder and not repeated; a
run that was stopped goes on. Writes benchmarks/results/cpu/growth.json and growth.png.
"""

from __future__ import annotations

import argparse
import json
import statistics
from itertools import pairwise
from pathlib import Path

from benchmarks.lib import growth_cost, harness
from benchmarks.lib.training_runs import ROOT, trained
from bert_unpad._files import write_text
from bert_unpad._plots import new_figure, save_figure
from bert_unpad.pretrain.config import GrowthConfig
from bert_unpad.pretrain.growth import Growth, Setting, make_growth
from bert_unpad.pretrain.output.report import is_reported

LAYERS = 12
CONTENDERS = {
    "full": {},
    "mslt": {"name": "mslt", "layers": [3, 6, 9, 12]},
    "mslt, joint 20 %": {
        "name": "mslt",
        "layers": [3, 6, 9, 12],
        "shares": [0.5, 0.1, 0.1, 0.1],
        "joint_share": 0.2,
    },
    "stacking": {"name": "stacking"},
    "layer drop": {"name": "layer_drop"},
}


def plan(name: str, seed: int, options: argparse.Namespace) -> Growth:
    setting = Setting(seed, options.steps, LAYERS, options.length)
    return make_growth(GrowthConfig(**CONTENDERS[name]), setting)


def train(name: str, seed: int, options: argparse.Namespace) -> list[dict] | None:
    """The log of one run; of what is in the folder if it is complete. None with --finished."""
    folder = f"{name.replace(', ', '-').replace(' ', '-').replace('%', 'percent')}-{seed}"
    run_dir = options.folder / options.key / folder
    if options.finished and not is_reported(run_dir, options.steps):
        return None
    settings = {
        "seed": seed,
        "model.hidden_size": options.hidden,
        "model.num_hidden_layers": LAYERS,
        "model.num_attention_heads": max(options.hidden // 32, 1),
        "model.intermediate_size": 4 * options.hidden,
        "model.max_position_embeddings": options.length,
        "data.max_seq_length": options.length,
        "data.vocab_size": options.vocab,
        "batching.global_batch_size": options.batch,
        "optimizer.lr": options.lr,
        "checkpoint.every": 100,
        "checkpoint.keep_last": 1,
        "evaluation.every": options.evaluate,
        "evaluation.examples": options.examples,
        **{f"growth.{key}": value for key, value in CONTENDERS[name].items()},
    }
    return trained(run_dir, options.steps, settings)


def measure(options: argparse.Namespace) -> dict[str, dict]:
    """What an update costs in each stage of all contenders; measured once, kept with the runs."""
    path = options.folder / options.key / "costs.json"
    if not path.is_file():
        growths = {name: plan(name, 0, options) for name in CONTENDERS}
        costs = growth_cost.measure(growths, LAYERS, options)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(costs, indent=1) + "\n")
    return json.loads(path.read_text(encoding="utf-8"))


def seconds_by_step(growth: Growth, steps: int, costs: dict[str, dict]) -> list[float]:
    """CPU time of the updates made after 0, 1, ... updates."""
    total = [0.0]
    for step in range(steps):
        key = growth_cost.key(growth, growth.index(step))
        total.append(total[-1] + costs[key]["cpu_seconds"])
    return total


def summarise(lines: list[dict], seconds: list[float]) -> dict:
    """Losses in nats, over CPU seconds."""
    held_out = [line for line in lines if line["kind"] == "evaluation"]
    return {
        "final_mlm_loss": held_out[-1]["mlm_loss"],
        "final_mlm_accuracy": held_out[-1]["mlm_accuracy"],
        "cpu_seconds": seconds[-1],
        "curve": [
            {"step": x["step"], "cpu_seconds": seconds[x["step"]], "mlm_loss": x["mlm_loss"]}
            for x in held_out
        ],
    }


def time_to(loss: float, curve: list[dict]) -> float | None:
    """CPU seconds until the held-out loss is reached, between evaluations by interpolation."""
    for before, after in pairwise(curve):
        if after["mlm_loss"] <= loss < before["mlm_loss"]:
            part = (before["mlm_loss"] - loss) / (before["mlm_loss"] - after["mlm_loss"])
            return before["cpu_seconds"] + part * (after["cpu_seconds"] - before["cpu_seconds"])
    return None


def compare_with_full(results: list[dict]) -> None:
    """Adds to each run what it is beside full training with the same seed."""
    full = {run["seed"]: run for run in results if run["contender"] == "full"}
    for run in results:
        if (other := full.get(run["seed"])) is None:
            continue
        reached = time_to(other["final_mlm_loss"], run["curve"])
        run["cheaper"] = other["cpu_seconds"] / run["cpu_seconds"]
        run["worse"] = run["final_mlm_loss"] / other["final_mlm_loss"] - 1
        run["cpu_seconds_to_loss_of_full"] = other["cpu_seconds"] if other is run else reached


def draw(path: Path, results: list[dict]) -> None:
    figure = new_figure(11, 5)
    curves, trade = figure.subplots(1, 2)
    for number, name in enumerate(CONTENDERS):
        runs = [run for run in results if run["contender"] == name]
        style = {"color": f"C{number}", "alpha": 0.8}
        for run in runs:
            points = [(x["cpu_seconds"], x["mlm_loss"]) for x in run["curve"]]
            label = name if run is runs[0] else None
            curves.plot(*zip(*points, strict=True), marker=".", label=label, **style)
        found = [(run["cheaper"], 100 * run["worse"]) for run in runs if "cheaper" in run]
        if found:
            trade.scatter(*zip(*found, strict=True), label=name, **style)
    curves.set(xlabel="CPU seconds of training", ylabel="held-out masked-token loss (nats)")
    trade.set(xlabel="times cheaper than full training", ylabel="final loss above full training, %")
    trade.axvline(2.1, color="grey", ls=":")
    trade.axhline(3, color="grey", ls=":")
    for axes in (curves, trade):
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    save_figure(figure, path)


def compare() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "compare_growth")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--length", type=int, default=128, help="longest example, in tokens")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--evaluate", type=int, default=50, help="updates between evaluations")
    parser.add_argument("--examples", type=int, default=400, help="of an evaluation")
    parser.add_argument("--rounds", type=int, default=15, help="of measuring the cost")
    parser.add_argument("--only", nargs="*", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--finished", action="store_true", help="take the runs that are complete")
    parser.add_argument("--no-cost", action="store_true", help="train only, write nothing")
    options = parser.parse_args()
    options.folder = options.folder.resolve()
    options.key = (
        f"hidden{options.hidden}-vocab{options.vocab}-length{options.length}-batch{options.batch}"
        f"-lr{options.lr}-steps{options.steps}-every{options.evaluate}-of{options.examples}"
    )
    logs = {}
    for seed in range(options.seeds):
        for name in options.only:
            lines = train(name, seed, options)
            if lines is None:
                continue
            logs[name, seed] = lines
            last = [line for line in logs[name, seed] if line["kind"] == "evaluation"][-1]
            print(f"{name:<22} seed {seed}: held out {last['mlm_loss']:.3f}", flush=True)
    if options.no_cost:
        return
    costs = measure(options)
    results = []
    for (name, seed), lines in logs.items():
        seconds = seconds_by_step(plan(name, seed, options), options.steps, costs)
        results.append({"contender": name, "seed": seed, **summarise(lines, seconds)})
    compare_with_full(results)
    print_table(results)
    stages = {
        name: [
            {
                "end": stage.end,
                "layers": stage.layers,
                "frozen": stage.frozen,
                **costs[growth_cost.key(growth, index)],
            }
            for index, stage in enumerate(growth.stages)
        ]
        for name in options.only
        for growth in [plan(name, 0, options)]
    }
    settings = {
        k: v
        for k, v in vars(options).items()
        if k not in ("folder", "key", "only", "no_cost", "finished")
    }
    command = harness.command()
    payload = {**settings, "layers": LAYERS, "contenders": CONTENDERS}
    path = harness.save("growth", "cpu", command, {**payload, "stages": stages, "runs": results})
    draw(path.with_suffix(".png"), results)
    print(f"written: {path} and {path.with_suffix('.png').name}")


def print_table(results: list[dict]) -> None:
    """Means over seeds."""
    print(f"\n{'':<22} seeds  final loss   worse  cheaper  CPU s  CPU s to full's loss")
    for name in dict.fromkeys(run["contender"] for run in results):
        runs = [run for run in results if run["contender"] == name]
        reached = [run.get("cpu_seconds_to_loss_of_full") for run in runs]
        cells = [
            f"{len(runs):5d} ",
            f"{statistics.mean(run['final_mlm_loss'] for run in runs):10.3f}",
            f"{statistics.mean(run.get('worse', 0) for run in runs):7.1%}",
            f"{statistics.mean(run.get('cheaper', 0) for run in runs):7.2f}x",
            f"{statistics.mean(run['cpu_seconds'] for run in runs):6.0f}",
            f"{statistics.mean(reached):6.0f}" if None not in reached else "not reached by all",
        ]
        print(f"{name:<22} {' '.join(cells)}")


if __name__ == "__main__":
    compare()
