"""Does clipping before the average train as well? Modes and policies on one model, in one table.

    python scripts/compare_clipping.py                        # 1 seed, 150 steps, 2 ranks
    python scripts/compare_clipping.py --seeds 3 --steps 900 --poison 1e6

Trains the quickstart model with a learning rate and a bound such that clipping acts in most steps,
once for each way of clipping and seed. With --poison the gradient of rank 1 is multiplied with that
number in 1 step of 50. Runs are kept in --folder and not repeated. Writes
benchmarks/results/cpu/clipping.json and clipping.png.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import harness
from bert_unpad.pretrain import loop, main
from bert_unpad.pretrain.metrics import read_json_lines

ROOT = Path(__file__).resolve().parent.parent
CONTENDERS = {
    "none": ("none", "equal"),
    "after": ("after", "equal"),
    "before": ("before", "equal"),
    "bucket, equal": ("bucket", "equal"),
    "bucket, numel": ("bucket", "numel"),
    "bucket, adaptive": ("bucket", "adaptive"),
}
POISON_EVERY = 50
SPIKE = 0.5  # nats above the mean of the 10 steps before


def poison(factor: float) -> None:
    """Makes rank 1 multiply its gradient in 1 step of POISON_EVERY."""
    honest, calls = loop.accumulate_gradient, 0

    def poisoned(model, step, counts, ranks, *rest):
        nonlocal calls
        calls += 1
        handles = []
        if ranks.rank == 1 and calls % POISON_EVERY == 0:
            handles = [p.register_hook(lambda g: g * factor) for p in model.parameters()]
        honest(model, step, counts, ranks, *rest)
        for handle in handles:
            handle.remove()

    loop.accumulate_gradient = poisoned


def train(folder: Path, name: str, seed: int, options: argparse.Namespace) -> list[dict]:
    """The log of one run; of what is in the folder if it is complete."""
    mode, policy = CONTENDERS[name]
    run_dir = folder / f"{name.replace(', ', '-')}-{seed}"
    settings = {
        "config": str(ROOT / "configs" / "quickstart.yaml"),
        "run_dir": str(run_dir),
        "seed": seed,
        "optimizer.lr": options.lr,
        "schedule.total_steps": options.steps,
        "schedule.warmup_share": 0.05,
        "clip.mode": mode,
        "clip.policy": policy,
        "clip.max_norm": options.max_norm,
        "checkpoint.every": 0,
        "evaluation.every": 0,
        "evaluation.examples": 500,
        "logging.every": 1,
        "logging.plots": "false",
        "logging.progress": "none",
    }
    arguments = [text for key, value in settings.items() for text in (f"--{key}", str(value))]
    launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
    command = [sys.executable, "-m", *launch, __file__, "--worker", str(options.poison), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and "FloatingPointError" not in done.stderr:
        raise SystemExit(f"{name} has failed:\n{done.stderr[-4000:]}")
    return read_json_lines(run_dir / "metrics.jsonl")


def summarise(lines: list[dict]) -> dict:
    """Losses in nats; the final one is None where the run has diverged."""
    train_lines = [line for line in lines if line["kind"] == "train"]
    held_out = [line["mlm_loss"] for line in lines if line["kind"] == "evaluation"]
    losses = [line["loss"] for line in train_lines]
    spikes = sum(
        losses[i] > SPIKE + statistics.mean(losses[i - 10 : i]) for i in range(10, len(losses))
    )
    shares = [x["clipped_share"] for x in train_lines if x["clipped_share"] is not None]
    return {
        "steps": len(losses),
        "final_training_loss": statistics.mean(losses[-20:]),
        "held_out_mlm_loss": held_out[-1] if held_out else None,
        "spikes": spikes,
        "clipped_share": statistics.mean(shares) if shares else None,
        "skipped_steps": sum(line["skipped_steps"] for line in train_lines),
        "losses": losses,
    }


def draw(path: Path, results: list[dict]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for number, name in enumerate(CONTENDERS):
        for run in (run for run in results if run["contender"] == name):
            first = run["seed"] == 0
            smooth = [
                statistics.mean(run["losses"][max(0, i - 9) : i + 1])
                for i in range(len(run["losses"]))
            ]
            axes.plot(smooth, color=f"C{number}", label=name if first else None, alpha=0.8)
    axes.set(xlabel="step", ylabel="loss (nats, mean of 10 steps)")
    axes.legend()
    axes.grid(alpha=0.3)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    figure.savefig(temporary, format="png", dpi=120)
    os.replace(temporary, path)


def compare() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/compare_clipping"))
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--max-norm", type=float, default=0.5)
    parser.add_argument("--poison", type=float, default=1.0, help="factor; 1: none")
    parser.add_argument("--only", nargs="*", choices=CONTENDERS, default=list(CONTENDERS))
    options = parser.parse_args()
    key = f"steps{options.steps}-lr{options.lr}-norm{options.max_norm}-poison{options.poison}"
    results = []
    print(f"{'':<18} seed  training  held out  spikes  clipped  skipped")
    for seed in range(options.seeds):
        for name in options.only:
            found = summarise(train(options.folder / key, name, seed, options))
            results.append({"contender": name, "seed": seed, **found})
            cells = [found["final_training_loss"], found["held_out_mlm_loss"]]
            loss, held_out = ("diverged" if x is None else f"{x:8.3f}" for x in cells)
            share = found["clipped_share"]
            print(
                f"{name:<18} {seed:>4}  {loss}  {held_out}  {found['spikes']:>6}  "
                f"{'-' if share is None else format(share, '.2f'):>7}  {found['skipped_steps']:>7}",
                flush=True,
            )
    settings = {k: v for k, v in vars(options).items() if k not in ("folder", "only")}
    command = " ".join(["python", "scripts/compare_clipping.py", *sys.argv[1:]])
    path = harness.save("clipping", "cpu", command, {**settings, "results": results})
    draw(path.with_suffix(".png"), results)
    print(f"written: {path} and {path.with_suffix('.png').name}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        poison(float(sys.argv[2]))
        sys.exit(main(sys.argv[3:]))
    compare()
