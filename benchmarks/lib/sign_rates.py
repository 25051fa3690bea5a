"""The sign_* operators on a model's momentum, and a copy of memory: how many bytes a second.

The copy takes its turn among them, so that a share of its rate means what the machine gave at the
time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.lib import timers
from bert_unpad import ops

COPY = "copy"


def run(device: str, numel: int, ranks: int, rounds: int, warmup: int = 2) -> dict[str, Any]:
    """The report; prints it too.

    Args:
        device: "cpu" or "cuda".
        numel: values of the momentum.
        ranks: how many there would be.
        rounds: that count.
        warmup: rounds before those.
    """
    torch.manual_seed(0)
    value, error, out = (torch.randn(numel, device=device) for _ in range(3))
    bits = torch.empty(-(-numel // 8), dtype=torch.uint8, device=device)
    part = -(-numel // (8 * ranks))
    parts = torch.randint(256, (ranks, part), dtype=torch.uint8, device=device)
    scales = torch.rand(ranks, device=device)
    server = torch.zeros(min(8 * part, numel), device=device)
    scale = ops.sign_scale(value, error)
    steps: dict[str, Callable[[], Any]] = {
        COPY: lambda: out.copy_(value),
        "scale of value + error": lambda: ops.sign_scale(value, error),
        "bits, and the new error": lambda: ops.sign_pack_(value, error, bits, scale),
        f"mean of a part of {ranks} ranks": lambda: ops.sign_mean_(parts, scales, server, add=True),
        "all parts to float32": lambda: ops.sign_unpack_(parts, scales, out),
    }
    # What each must read and write at least.
    moved = dict(
        zip(
            steps,
            (
                8 * numel,
                8 * numel,
                12 * numel + bits.nbytes,
                8 * server.numel() + parts.nbytes,
                4 * numel + parts.nbytes,
            ),
            strict=True,
        )
    )
    timer = timers.CudaTimer() if device == "cuda" else timers.HostTimer()
    timings = timers.interleave(timer, steps, rounds, warmup)
    seconds = {name: timing.median for name, timing in timings.items()}
    rate = moved[COPY] / seconds[COPY]
    rows = []
    print(f"{numel / 1e6:.1f} M values, {ranks} ranks")
    print(f"  {'':28s}{'ms':>9s}{'GB/s':>7s}{'of copy':>9s}")
    for name in steps:
        row = {
            "operator": name,
            "seconds": seconds[name],
            "bytes": moved[name],
            "gb_per_s": moved[name] / seconds[name] / 1e9,
            "copy_share": moved[name] / seconds[name] / rate,
            "rounds": timings[name].rounds,
        }
        rows.append(row)
        print(
            f"  {name:28s}{row['seconds'] * 1e3:9.2f}{row['gb_per_s']:7.1f}{row['copy_share']:9.1%}"
        )
    return {
        "numel": numel,
        "ranks": ranks,
        "rounds": rounds,
        "time": "median of rounds in which operators take turns",
        "bytes": "that an operator must read and write at least",
        "copy_bytes_per_second": rate,
        "results": rows,
    }
