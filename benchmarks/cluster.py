"""What each way of saving bytes buys on a slow link: real runs of the trainer on two hosts.

    python -m benchmarks.cluster                    # 88 updates each, below 10 minutes
    python -m benchmarks.cluster --rate 1gbit --steps 240

Trains the quickstart's model on its text, each contender with the same seed, examples and number of
updates: two processes of one thread, in two network namespaces joined by a link of limited rate
(where the rights for that are missing it says so and uses loopback), gloo. The times are of the
updates behind `comm.start`, where every contender exchanges as it says. Bytes are what leaves the
first host, headers and acknowledgements included. Writes benchmarks/results/cpu/cluster.json and
cluster.png: the training loss against seconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.lib import harness
from benchmarks.lib.network import Hosts, loopback, two_hosts
from benchmarks.lib.processes import next_port, run_ranks
from bert_unpad._plots import new_figure, save_figure
from bert_unpad.data import DataConfig, prepare
from bert_unpad.pretrain import main
from bert_unpad.pretrain.config import read_config
from bert_unpad.pretrain.gradients.sync import GradientSync
from bert_unpad.pretrain.output.metrics import read_json_lines

ROOT = Path(__file__).resolve().parent.parent
CLIP = {"clip.mode": "bucket", "clip.policy": "adaptive"}
OVERLAP = CLIP | {"comm.bucket_mb": 2}
BF16 = {"clip.wire_dtype": "bf16", "clip.error_feedback": "true"}
LOCAL = {"comm.hook": "post_local_sgd", "comm.local_sgd_group": 1}
CONTENDERS: dict[str, dict[str, Any]] = {
    "plain DDP": {"clip.mode": "after"},  # 25 MiB in a bucket: this model is one
    "+ bucket overlap": OVERLAP,
    "+ bf16": OVERLAP | BF16,
    "+ PowerSGD": CLIP | {"comm.hook": "power_sgd"},
    "+ local SGD": OVERLAP | LOCAL,
    # PowerSGD is another exchange, and goes with neither of the others.
    "all that go together": OVERLAP | BF16 | LOCAL,
}
LAST = 10  # updates whose mean is the final training loss
SENT = 8  # place of the sent bytes behind a device's name in /proc/net/dev


def sent_bytes() -> int:
    """Bytes that have left this process's host, by the device that gloo uses."""
    device = os.environ["GLOO_SOCKET_IFNAME"]
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, values = line.partition(":")
        if name.strip() == device:
            # Both ranks send on one loopback device, each as much as the other.
            return int(values.split()[SENT]) // (2 if device == "lo" else 1)
    raise SystemExit(f"no network device {device}")


@contextmanager
def counted() -> Iterator[list[int]]:
    """Notes the bytes sent so far at the beginning of each update."""
    honest, seen = GradientSync.accumulate, []

    def counting(*arguments: Any) -> Tensor:
        seen.append(sent_bytes())
        return honest(*arguments)

    GradientSync.accumulate = counting
    try:
        yield seen
    finally:
        GradientSync.accumulate = honest


def work(runs: list[list]) -> int:
    """What each rank does: the runs one after the other."""
    for path, arguments in runs:
        next_port()
        with counted() as seen:
            if code := main(arguments):
                return code
        if os.environ["RANK"] == "0":
            Path(path).write_text(json.dumps(seen))
    return 0


def settings_of(name: str, run_dir: Path, options: argparse.Namespace) -> list[str]:
    """The run's arguments for pretrain.py."""
    settings = {
        "config": ROOT / "configs" / "quickstart.yaml",
        "run_dir": run_dir,
        "resume": "never",
        "seed": options.seed,
        "device": "cpu",
        "batching.global_batch_size": options.batch,
        "schedule.total_steps": options.steps,
        "schedule.warmup_share": 0.1,
        "comm.start": options.start,
        "comm.local_sgd_period": options.period,
        "checkpoint.every": 0,
        "evaluation.every": 0,
        "evaluation.examples": options.examples,
        "logging.every": 1,
        "logging.progress": "none",
        **CONTENDERS[name],
    }
    return [text for key, value in settings.items() for text in (f"--{key}", str(value))]


def summarise(run_dir: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds, bytes (a float: the mean of an update), losses in nats."""
    lines = read_json_lines(run_dir / "metrics.jsonl")
    train = [line for line in lines if line["kind"] == "train"]
    (held_out,) = (line for line in lines if line["kind"] == "evaluation")
    seconds = [line["seconds"] for line in train]
    steps = [b - a for a, b in itertools.pairwise(seconds)][options.start :]
    every = json.loads((run_dir / "sent.json").read_text())
    sent = every[options.start :]
    return {
        "step_seconds": statistics.median(steps),
        "mean_step_seconds": statistics.fmean(steps),
        "step_seconds_range": [min(steps), max(steps)],
        "bytes_per_step": (sent[-1] - sent[0]) / (len(sent) - 1),
        "total_bytes": every[-1] - every[0],  # but for the last update
        "total_seconds": seconds[-1],
        "final_training_loss": statistics.fmean(line["loss"] for line in train[-LAST:]),
        "held_out_mlm_loss": held_out["mlm_loss"],
        "skipped_steps": sum(line["skipped_steps"] for line in train),
        "seconds": [round(value, 3) for value in seconds],
        "losses": [round(line["loss"], 4) for line in train],
    }


def show(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'':<22} {'step: median, mean':>20} {'MB/step':>9} {'MB':>8} {'total':>9}  held-out loss"
    )
    for row in rows:
        step = f"{row['step_seconds']:.3f}, {row['mean_step_seconds']:.3f} s"
        per_step, total = row["bytes_per_step"] / 1e6, row["total_bytes"] / 1e6
        print(
            f"{row['contender']:<22} {step:>20} {per_step:>9.2f} {total:>8.0f} "
            f"{row['total_seconds']:>7.1f} s  {row['held_out_mlm_loss']:.4f}"
        )


def draw(path: Path, rows: list[dict[str, Any]], link: str) -> None:
    figure = new_figure(8, 4.5)
    axes = figure.subplots()
    for row in rows:
        losses = row["losses"]
        smooth = [
            statistics.fmean(losses[max(0, i - LAST + 1) : i + 1]) for i in range(len(losses))
        ]
        axes.plot(row["seconds"], smooth, label=row["contender"], linewidth=1.3)
    axes.set(
        xlabel="seconds of training",
        ylabel=f"training loss (nats, mean of {LAST} updates)",
        title=f"{len(rows[0]['losses'])} updates on two hosts joined by {link}",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path)


def compare() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmark_cluster"))
    parser.add_argument("--rate", default="200mbit", help="of the link, as tc reads it")
    parser.add_argument("--steps", type=int, default=88, help="updates of each run")
    parser.add_argument("--batch", type=int, default=32, help="sequences, of both hosts")
    parser.add_argument("--start", type=int, default=16, help="first updates, by plain allreduces")
    parser.add_argument("--period", type=int, default=8, help="updates between averages of models")
    parser.add_argument("--examples", type=int, default=400, help="held out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    options = parser.parse_args()
    if options.steps < options.start + 2:
        parser.error("--steps must be at least --start + 2: what comes behind is measured")
    folders = {
        name: options.folder / name.removeprefix("+ ").replace(" ", "-") for name in options.only
    }
    jobs = []
    for name, folder in folders.items():
        arguments = settings_of(name, folder, options)
        jobs.append([str(folder / "sent.json"), arguments])
        config, _ = read_config(arguments)
        _prepare(config.data)
    command = [sys.executable, "-m", "benchmarks.cluster", "--worker", json.dumps(jobs)]
    load = os.getloadavg()[0]  # above 1: the machine has other work to do
    link = options.rate
    try:
        with two_hosts(options.rate) as hosts:
            _run(command, hosts)
    except PermissionError as error:
        print(f"no link of limited rate, using loopback: {error}", file=sys.stderr)
        link = "loopback"
        _run(command, loopback())
    rows = [
        {"contender": name, "settings": CONTENDERS[name], **summarise(folder, options)}
        for name, folder in folders.items()
    ]
    show(rows)
    settings = {k: v for k, v in vars(options).items() if k not in ("folder", "only", "rate")}
    said = harness.command()
    payload = {"link": link, **settings, "load_average_before": load, "results": rows}
    path = harness.save("cluster", "cpu", said, payload)
    draw(path.with_suffix(".png"), rows, link)
    print(f"written: {path} and {path.with_suffix('.png').name}")


def _prepare(data: DataConfig) -> None:
    """Before the clock runs; the same data for all contenders are made once."""
    prepare(data)


def _run(command: list[str], hosts: Hosts) -> None:
    run_ranks(command, 2, hosts)  # what rank 0 prints is dropped


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        sys.exit(work(json.loads(sys.argv[2])))
    compare()
