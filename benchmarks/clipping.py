"""Does clipping before the average train as well? Modes and policies on one model, in one table.

    python -m benchmarks.clipping                        # 1 seed, 60 steps, 2 ranks
    python -m benchmarks.clipping --seeds 3 --poison 1 1e6

Trains a small BERT with a learning rate and a bound such that clipping acts in most steps,
once for each way of clipping, poison and seed. A poison is a factor on the gradient of rank 1 in
every --poison-every-th step. Runs are kept in --folder and not repeated, so that the same command
continues where it was stopped. Writes benchmarks/results/cpu/clipping.json and clipping.png.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from benchmarks.lib import harness
from benchmarks.lib.processes import next_port, run_ranks
from bert_unpad._plots import new_figure, save_figure
from bert_unpad.pretrain.config import read_config
from bert_unpad.pretrain.output.metrics import read_json_lines
from bert_unpad.pretrain.parallel import Way
from bert_unpad.pretrain.pretrain import pretrain
from bert_unpad.pretrain.ranks import join_ranks

ROOT = Path(__file__).resolve().parent.parent
CONTENDERS = {
    "none": ("none", "equal"),
    "after": ("after", "equal"),
    "before": ("before", "equal"),
    "bucket, equal": ("bucket", "equal"),
    "bucket, numel": ("bucket", "numel"),
    "bucket, adaptive": ("bucket", "adaptive"),
}
SPIKE = 0.5  # nats above the mean of the 10 steps before
LAST = 10  # steps whose mean is the final training loss


@contextmanager
def poisoned(factor: float, every: int) -> Iterator[None]:
    """Makes rank 1 multiply its gradient in every `every`-th step."""
    honest, calls = Way.accumulate, 0

    def with_poison(way: Way, step, counts):
        nonlocal calls
        calls += 1
        handles = []
        if dist.get_rank() == 1 and factor != 1 and calls % every == 0:
            handles = [p.register_hook(lambda g: g * factor) for p in way.run.model.parameters()]
        sums = honest(way, step, counts)
        for handle in handles:
            handle.remove()
        return sums

    Way.accumulate = with_poison
    try:
        yield
    finally:
        Way.accumulate = honest


def train(policy: str, arguments: list[str]) -> int:
    """A run with a policy of `BucketClip`, which need not be an option of the trainer."""
    config, resolved = read_config(arguments)
    config.clip.policy = policy
    with join_ranks(config) as ranks:
        return pretrain(config, resolved, ranks)


def work(runs: list[list]) -> int:
    """What each rank does: the runs one after the other, a diverged one ending early."""
    for factor, every, policy, arguments in runs:
        next_port()
        with poisoned(factor, every):
            try:
                code = train(policy, arguments)
            except FloatingPointError as error:  # on all ranks, at the same step
                print(error, file=sys.stderr)
                continue
        if code:
            return code
    return 0


def settings_of(name: str, seed: int, run_dir: Path, options: argparse.Namespace) -> list[str]:
    """The run's arguments for pretrain.py."""
    mode, _ = CONTENDERS[name]
    settings = {
        "config": str(ROOT / "configs" / "bert_small.yaml"),
        "run_dir": str(run_dir),
        "seed": seed,
        "device": "cpu",
        "batching.global_batch_size": options.batch,
        "optimizer.lr": options.lr,
        "schedule.total_steps": options.steps,
        "schedule.warmup_share": 0.05,
        "clip.mode": mode,
        "clip.max_norm": options.max_norm,
        "checkpoint.every": 0,
        "evaluation.every": 0,
        "evaluation.examples": 300,
        "logging.every": 1,
        "logging.progress": "none",
    }
    return [text for key, value in settings.items() for text in (f"--{key}", str(value))]


def summarise(lines: list[dict]) -> dict:
    """Losses in nats; the held-out one is None where the run has diverged."""
    train_lines = [line for line in lines if line["kind"] == "train"]
    held_out = [line["mlm_loss"] for line in lines if line["kind"] == "evaluation"]
    losses = [line["loss"] for line in train_lines]
    spikes = sum(
        losses[i] > SPIKE + statistics.mean(losses[i - 10 : i]) for i in range(10, len(losses))
    )
    shares = [x["clipped_share"] for x in train_lines if x["clipped_share"] is not None]
    return {
        "steps": len(losses),
        "final_training_loss": round(statistics.mean(losses[-LAST:]), 4),
        "held_out_mlm_loss": round(held_out[-1], 4) if held_out else None,
        "spikes": spikes,
        "clipped_share": round(statistics.mean(shares), 4) if shares else None,
        "skipped_steps": sum(line["skipped_steps"] for line in train_lines),
        "losses": [round(loss, 3) for loss in losses],
    }


def table(results: list[dict]) -> list[dict]:
    """Mean and range over the seeds of each way of clipping and poison."""
    rows = []
    for poison, name in dict.fromkeys((run["poison"], run["contender"]) for run in results):
        runs = [run for run in results if (run["poison"], run["contender"]) == (poison, name)]
        row = {"poison": poison, "contender": name, "runs": len(runs)}
        for key in ("final_training_loss", "held_out_mlm_loss"):
            values = [run[key] for run in runs if run[key] is not None]
            row[key] = round(statistics.mean(values), 4) if values else None
            row[f"{key}_range"] = [min(values), max(values)] if values else None
        shares = [run["clipped_share"] for run in runs if run["clipped_share"] is not None]
        row["clipped_share"] = round(statistics.mean(shares), 4) if shares else None
        row["spikes"] = sum(run["spikes"] for run in runs)
        row["skipped_steps"] = sum(run["skipped_steps"] for run in runs)
        row["diverged"] = sum(run["held_out_mlm_loss"] is None for run in runs)
        rows.append(row)
    return rows


def show(rows: list[dict]) -> None:
    print(f"{'poison':>8} {'':<18} {'held out (range)':<24} {'training':>8}  clipped  spikes")
    for row in rows:
        loss, spread = row["held_out_mlm_loss"], row["held_out_mlm_loss_range"]
        share = "-" if row["clipped_share"] is None else f"{row['clipped_share']:.2f}"
        cells = "diverged" if loss is None else f"{loss:.3f} ({spread[0]:.3f} .. {spread[1]:.3f})"
        print(
            f"{row['poison']:>8g} {row['contender']:<18} {cells:<24} "
            f"{row['final_training_loss']:>8.3f}  {share:>7}  {row['spikes']:>6}"
        )


def draw(path: Path, results: list[dict]) -> None:
    """A panel a poison, a line a run."""
    poisons = list(dict.fromkeys(run["poison"] for run in results))
    figure = new_figure(6.5 * len(poisons), 4.5)
    panels = figure.subplots(1, len(poisons), sharey=True, squeeze=False)[0]
    for axes, poison in zip(panels, poisons, strict=True):
        for number, name in enumerate(CONTENDERS):
            label = name
            for run in results:
                if (run["contender"], run["poison"]) != (name, poison):
                    continue
                smooth = [
                    statistics.mean(run["losses"][max(0, i - 4) : i + 1])
                    for i in range(len(run["losses"]))
                ]
                axes.plot(smooth, color=f"C{number}", label=label, alpha=0.8, linewidth=1.2)
                label = None
        title = "all ranks sound" if poison == 1 else f"one rank's gradient times {poison:g}"
        axes.set(xlabel="step", title=title)
        axes.grid(alpha=0.3)
    panels[0].set(ylabel="training loss (nats, mean of 5 steps)")
    panels[0].legend()
    save_figure(figure, path)


def compare() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/compare_clipping"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16, help="sequences, of all ranks")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--max-norm", type=float, default=0.5)
    parser.add_argument("--poison", type=float, nargs="+", default=[1.0], help="factors; 1: none")
    parser.add_argument("--poison-every", type=int, default=25, metavar="STEPS")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    options = parser.parse_args()
    key = f"steps{options.steps}-batch{options.batch}-lr{options.lr}-norm{options.max_norm}"
    cases = [
        (options.folder / key / f"{name.replace(', ', '-')}-{poison:g}-{seed}", name, poison, seed)
        for seed in range(options.seeds)
        for poison in options.poison
        for name in options.only
    ]
    jobs = [
        (
            *(poison, options.poison_every, CONTENDERS[name][1]),
            settings_of(name, seed, run_dir, options),
        )
        for run_dir, name, poison, seed in cases
    ]
    command = [sys.executable, "-m", "benchmarks.clipping", "--worker", json.dumps(jobs)]
    run_ranks(command, options.ranks)  # its output is dropped
    results = [
        {"contender": name, "poison": poison, "seed": seed}
        | summarise(read_json_lines(run_dir / "metrics.jsonl"))
        for run_dir, name, poison, seed in cases
    ]
    rows = table(results)
    show(rows)
    settings = {k: v for k, v in vars(options).items() if k not in ("folder", "only")}
    said = harness.command()
    path = harness.save("clipping", "cpu", said, {**settings, "table": rows, "results": results})
    draw(path.with_suffix(".png"), results)
    print(f"written: {path} and {path.with_suffix('.png').name}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        sys.exit(work(json.loads(sys.argv[2])))
    compare()
