"""What a slow rank costs, and how much of it shares of work in proportion to speed win back.

    python -m benchmarks.rank_speeds                # about 6 minutes on two quiet cores

Two ranks train a small BERT (configs/bert_small.yaml), each bound to a core of its own; a program
that never rests is bound to the second core too, so that rank gets half of its time. In turns, each
round: shares that are equal, and shares by measured speed (`batching.rank_speeds: auto`). All runs
have the same global batches, so their losses must be equal to rounding. Writes
benchmarks/results/cpu/rank_speeds.json.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.lib import harness
from benchmarks.lib.processes import RankPool, serve
from benchmarks.lib.training_runs import ROOT, as_arguments, train_here
from bert_unpad.pretrain.output.metrics import read_json_lines

WORKER = "--worker"
SHARES = {"equal": "[1, 1]", "by speed": "auto"}
BUSY = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"


def work(job: dict[str, Any]) -> int:
    """One run on one rank, beside a busy neighbour if that is asked for; its exit code."""
    rank = int(os.environ["RANK"])
    core = job["cores"][rank]
    os.sched_setaffinity(0, {core})
    neighbour = None
    if job["busy"] and rank == 1:
        neighbour = subprocess.Popen([sys.executable, "-c", BUSY, str(core)])
    try:
        return train_here(job["arguments"])
    finally:
        if neighbour is not None:
            neighbour.kill()
            neighbour.wait()


def run(ranks: RankPool, name: str, busy: bool, cores: list[int], options: Any) -> dict[str, Any]:
    """Seconds of an update once speeds have settled, and losses."""
    run_dir = options.folder / name.replace(" ", "-")
    settings = {
        "config": ROOT / "configs" / "bert_small.yaml",
        "run_dir": run_dir,
        "resume": "never",
        "device": "cpu",
        "batching.global_batch_size": options.batch,
        "batching.rank_speeds": SHARES[name],
        "schedule.total_steps": options.steps,
        "checkpoint.every": 0,
        "evaluation.every": 0,
        "evaluation.examples": 0,
        "logging.every": 1,
        "logging.progress": "none",
    }
    job = {"arguments": as_arguments(settings), "busy": busy, "cores": cores}
    if code := ranks.run(job):
        raise SystemExit(f"a run has failed with code {code}; its message is above")
    lines = read_json_lines(run_dir / "metrics.jsonl")
    train = [line for line in lines if line["kind"] == "train"]
    seconds = [b["seconds"] - a["seconds"] for a, b in itertools.pairwise(train)]
    speeds = [line["speeds"] for line in lines if line["kind"] == "rank_speeds"]
    return {
        "step_seconds": statistics.median(seconds[options.settle :]),
        "losses": [line["loss"] for line in train],
        "speeds": speeds[-1] if speeds else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmark_rank_speeds"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60, help="updates of a run")
    parser.add_argument("--settle", type=int, default=36, help="updates that do not count")
    parser.add_argument("--batch", type=int, default=32, help="sequences, of both ranks")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("two cores are needed, one for each rank")
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    ranks = RankPool([sys.executable, "-m", "benchmarks.rank_speeds", WORKER], 2)
    try:
        run(ranks, "equal", False, cores, options)  # warm-up; makes the data
        for _ in range(options.rounds):
            for where, busy in (("a busy neighbour on one core", True), ("both cores free", False)):
                for name in SHARES:
                    result = run(ranks, name, busy, cores, options)
                    found.setdefault(where, {}).setdefault(name, []).append(result)
    finally:
        ranks.close()
    results = []
    for where, runs in found.items():
        equal, shared = ([x["step_seconds"] for x in runs[name]] for name in ("equal", "by speed"))
        ratios = [a / b for a, b in zip(equal, shared, strict=True)]
        curves = [x["losses"] for name in SHARES for x in runs[name]]
        differences = [max(column) - min(column) for column in zip(*curves, strict=True)]
        results.append(
            {
                "where": where,
                "step_seconds": {"equal": equal, "by speed": shared},
                "faster_by": statistics.median(ratios),
                "faster_by_range": [min(ratios), max(ratios)],
                "speeds": [x["speeds"] for x in runs["by speed"]],
                "largest_difference_of_losses": max(differences),
            }
        )
        print(
            f"{where:<30} equal {statistics.median(equal):.3f} s, by speed "
            f"{statistics.median(shared):.3f} s: {statistics.median(ratios):.2f}x "
            f"({min(ratios):.2f} to {max(ratios):.2f}); losses differ by {max(differences):.1e}"
        )
    settings = {k: v for k, v in vars(options).items() if k != "folder"}
    path = harness.save("rank_speeds", "cpu", harness.command(), {**settings, "results": results})
    print(f"written: {path}")


if __name__ == "__main__":
    serve(work) if sys.argv[1:] == [WORKER] else main()
