"""How many sequences a second one core makes ready for training, and how soon training starts.

    python -m benchmarks.feed --json

Writes random examples of one length as shards to a temporary folder. One thread then collates all
of them in random order, batch by batch, as the trainer does in the background; kinds of masks take
turns. The files stay in the page cache. Last, a
loop of Python runs beside a thread that collates: its speed, as a share of that alone, says how
much of the interpreter collating leaves to others (on a machine with two cores or more). Then
prepared data of 30 GB, in sparse files, is opened as ranks do it.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from benchmarks.lib import harness
from benchmarks.lib.feed_files import tokenizer, write_shards
from bert_unpad.data import PackedCollator, ShardDataset
from bert_unpad.data.masking import MaskUnit

TARGETS = {128: 20_000, 512: 6_000}  # sequences a second of one core
SPIN_SECONDS = 1.0
SPIN_ROUNDS = 3


def collate_all(collator: PackedCollator, batches: list[np.ndarray]) -> None:
    """One pass over the examples."""
    for indices in batches:
        collator(indices, 0)


def spin(seconds: float) -> float:
    """Turns a second of a loop of Python."""
    turns, started = 0, time.perf_counter()
    while (passed := time.perf_counter() - started) < seconds:
        turns += 1
    return turns / passed


def share_left(work: Callable[[], None], rounds: int) -> list[float]:
    """The speed of a loop of Python beside a thread that does `work`, over that alone."""
    shares = []
    for _ in range(rounds):
        alone, stop = spin(SPIN_SECONDS), threading.Event()

        def again(stop: threading.Event = stop) -> None:
            while not stop.is_set():
                work()

        thread = threading.Thread(target=again)
        thread.start()
        shares.append(spin(SPIN_SECONDS) / alone)
        stop.set()
        thread.join()
    return shares


def measure(length: int, tokens: int, batch_tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Times all contenders at one length; prints and returns a row of each."""
    count = tokens // length
    order = np.random.default_rng(1).permutation(count)
    batches = np.array_split(order, -(-tokens // batch_tokens))
    with tempfile.TemporaryDirectory() as folder:
        write_shards(Path(folder) / "shards", length, count)
        dataset = ShardDataset(Path(folder) / "shards")
        contenders = {}
        for unit in get_args(MaskUnit):
            collator = PackedCollator(dataset, tokenizer(), mask_unit=unit)
            contenders[unit] = functools.partial(collate_all, collator, batches)
        timings = harness.interleave(contenders, rounds)
        shares = {"token": share_left(contenders["token"], min(rounds, SPIN_ROUNDS))}
    rows = []
    for unit, timing in timings.items():
        rate = count / timing.median
        share = shares.get(unit)
        rows.append(
            {
                "length": length,
                "masks": unit,
                "sequences_per_second": rate,
                "rounds": [count / seconds for seconds in timing.rounds],
                "python_left": share,
            }
        )
        left = "" if share is None else f"  others keep {float(np.median(share)):.0%} of Python"
        print(f"{length:5d}  {unit:8s}{rate:12,.0f} sequences/s{left}")
    return rows


def measure_opening(gb: float, rounds: int) -> dict[str, Any]:
    """Times the opening of prepared data; prints and returns the seconds."""
    from benchmarks.lib.sparse_shards import time_opening

    seconds = time_opening(int(gb * 1e9), rounds)
    for name, values in seconds.items():
        print(f"{gb:g} GB, {name}: {np.median(values):.2f} s")
    return {"gb": gb, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=list(TARGETS))
    parser.add_argument("--tokens", type=int, default=1 << 21, help="of all examples of a length")
    parser.add_argument("--batch-tokens", type=int, default=1 << 15)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--open-gb", type=float, default=30, help="prepared data to open; 0: none")
    parser.add_argument("--json", action="store_true", help="write benchmarks/results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for length in args.lengths:
        rows += measure(length, args.tokens, args.batch_tokens, args.rounds)
    opened = measure_opening(args.open_gb, args.rounds) if args.open_gb else None
    if args.json:
        about = {"tokens": args.tokens, "batch_tokens": args.batch_tokens, "targets": TARGETS}
        found = {**about, "results": rows, "open": opened}
        print(harness.save("feed", "cpu", harness.command(), found))


if __name__ == "__main__":
    main()
