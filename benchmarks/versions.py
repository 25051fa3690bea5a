"""This build of bert_unpad against an earlier one, and stock Hugging Face, in turns, on a CPU.

    git worktree add ../earlier COMMIT   # and build it there: pip install or setup.py build_ext
    python -m benchmarks.versions --earlier ../earlier

Workloads: a training step of BERT-base, and inference through `hf.unpad` on mixed lengths. Each
contender lives in a process of its own; only one runs at a time. Writes
benchmarks/results/cpu/versions.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.lib import harness, version_worker

ROOT = Path(__file__).resolve().parent.parent
WORKLOADS = {"training": ("this", "earlier"), "inference": ("this", "earlier", "stock")}
DTYPES = ("bfloat16", "float32")


class Worker:
    """A contender's process; see benchmarks/lib/version_worker.py."""

    def __init__(self, checkout: Path, *args: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, version_worker.__file__, *args],
            env=os.environ | {"PYTHONPATH": str(checkout)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def seconds(self) -> float:
        """Runs the workload once."""
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a contender has ended; its message is above")
        return float(line)

    def end(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def compare(workload: str, dtype: str, earlier: Path, rounds: int) -> dict[str, Any]:
    """All contenders of one workload, with the ratios of their medians."""
    workers = {
        name: Worker(earlier if name == "earlier" else ROOT, workload, dtype, name)
        for name in WORKLOADS[workload]
    }
    times = {name: [] for name in workers}
    for number in range(2 + rounds):  # two to warm up
        for name, worker in workers.items():
            seconds = worker.seconds()
            if number >= 2:
                times[name].append(seconds)
    for worker in workers.values():
        worker.end()
    medians = {name: statistics.median(values) for name, values in times.items()}
    faster = {name: medians[name] / medians["this"] for name in medians if name != "this"}
    for name, seconds in medians.items():
        low, high = min(times[name]), max(times[name])
        print(
            f"{workload}, {dtype}: {name:8} {seconds:.3f} s ({low:.3f} to {high:.3f})", flush=True
        )
    return {
        "workload": workload,
        "dtype": dtype,
        "seconds": medians,
        "rounds": times,
        "faster_than": faster,
    }


def commit(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--earlier", type=Path, required=True, help="a built checkout")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    harness.add_name(parser, "versions")
    args = parser.parse_args()
    results = [
        compare(workload, dtype, args.earlier.resolve(), args.rounds)
        for workload in args.workloads
        for dtype in args.dtypes
    ]
    command = f"python -m benchmarks.versions --earlier CHECKOUT --rounds {args.rounds}"
    if set(args.workloads) < set(WORKLOADS):
        command += f" --workloads {' '.join(args.workloads)}"
    if set(args.dtypes) < set(DTYPES):
        command += f" --dtypes {' '.join(args.dtypes)}"
    if args.name != parser.get_default("name"):
        command += f" --name {args.name}"
    report = {"earlier": commit(args.earlier), "results": results}
    print(f"written to {harness.save(args.name, 'cpu', command, report)}")


if __name__ == "__main__":
    main()
