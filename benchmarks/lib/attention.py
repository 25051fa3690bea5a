"""Times attention's contenders on the cases: forward, backward and both, beside the device's floor.

Runs on a GPU. A rehearsal runs the same code on a CPU with small batches, where the peers that
need a GPU drop out with their reasons; its times mean nothing.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from benchmarks.lib import attention_peers, timers
from benchmarks.lib.attention_cases import PASSES, AttentionCase, attention_cases
from benchmarks.lib.attention_peers import CONTENDERS, OURS, PRIVATE, Contender, Inputs

# bf16 keeps 8 bits; a contender beyond this computes something else.
LARGEST_ERROR = 0.02


def _try(make: Callable[[Inputs, float], Contender], inputs: Inputs, p: float):
    """A contender, its errors, and why it does not run ("" where it does).

    PyTorch says in warnings why it refuses a backend.
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            contender = make(inputs, p)
            found = attention_peers.errors(make(inputs, 0.0))
            contender.backward(contender.forward())
        except attention_peers.NotSupportedError as reason:
            return None, {}, str(reason)
        except (RuntimeError, TypeError, ValueError, ImportError, AttributeError) as error:
            lines = [str(error), *(str(warning.message) for warning in said)]
            return None, {}, "; ".join(line.strip().split("\n")[0][:160] for line in lines)
    if max(found.values()) <= LARGEST_ERROR:  # NaN is not
        return contender, found, ""
    return None, {}, f"wrong result: {found}"


@cache
def _probe(name: str, dropout_p: float) -> str:
    """Why a contender must not run in this process ("" where it may): it is tried in its own.

    A kernel that fails takes the process's device with it, and so all contenders after it.
    """
    command = [sys.executable, "-m", "benchmarks.lib.attention", name, str(dropout_p)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    lines = done.stderr.strip().splitlines()
    return "" if done.returncode == 0 else (lines[-1][:160] if lines else f"{done.returncode}")


def try_alone(name: str, dropout_p: float) -> None:
    """Both passes of a contender on three sequences, and waits for the device."""
    case = AttentionCase("probe", (128, 200, 70), dropout_p)
    contender = CONTENDERS[name](Inputs.random(case, "cuda"), dropout_p)
    contender.backward(contender.forward())
    torch.cuda.synchronize()


def enter(
    inputs: Inputs, p: float, skip: Sequence[str]
) -> tuple[dict[str, Contender], dict[str, Any], dict[str, str]]:
    """The contenders that give right results, their errors, and why the others do not run."""
    entered, errors, missing = {}, {}, {}
    for name, make in CONTENDERS.items():
        if name in skip:
            missing[name] = "left out by --skip"
            continue
        reason = _probe(name, p) if name in PRIVATE and inputs.qkv.is_cuda else ""
        if reason:
            missing[name] = f"in a process of its own: {reason}"
            continue
        contender, found, reason = _try(make, inputs, p)
        if contender is not None:
            entered[name], errors[name] = contender, found
        elif name in OURS:
            raise SystemExit(f"{inputs.case.name}, our own {name!r} does not run: {reason}")
        else:
            missing[name] = reason
    return entered, errors, missing


def measure(
    case: AttentionCase,
    device: str,
    timer: timers.Timer,
    peaks: dict[str, float],
    rounds: int,
    skip: Sequence[str] = (),
) -> dict[str, Any]:
    """One case's row of the report."""
    inputs = Inputs.random(case, device)
    contenders, errors, missing = enter(inputs, case.dropout_p, skip)
    timings = timers.interleave(timer, timers.steps(contenders), rounds, warmup=3)
    row: dict[str, Any] = {
        "case": case.name,
        "dropout_p": case.dropout_p,
        "sequences": len(case.lengths),
        "tokens": case.tokens,
        "real_share_of_padded_tokens": case.padded_share,
        "not_run": missing,
        "errors": errors,
        "passes": {},
    }
    for which in PASSES:
        floor = case.floor(which, peaks["flops"], peaks["bytes"])
        parts = ("forward", "backward") if which == "both" else (which,)
        flops, moved = sum(map(case.flops, parts)), sum(map(case.bytes, parts))
        seconds = {name: timings[f"{which}/{name}"].median for name in contenders}
        row["passes"][which] = {
            "floor_ms": floor * 1e3,
            "contenders": {
                name: {
                    "ms": t * 1e3,
                    "tflops": flops / t / 1e12,
                    "gb_per_s": moved / t / 1e9,
                    "floor_share": floor / t,
                    "times_of": {ours: t / seconds[ours] for ours in OURS},
                }
                for name, t in seconds.items()
            },
        }
    return row


def show(row: dict[str, Any]) -> None:
    print(f"\n{row['case']}, dropout {row['dropout_p']}: {row['tokens']} tokens", end="")
    print(f", {row['real_share_of_padded_tokens']:.0%} of a padded batch")
    head = f"  {'':9s}{'':15s}{'ms':>9s}{'TFLOP/s':>9s}{'GB/s':>7s}{'of floor':>10s}"
    print(head + "".join(f"{'/ ' + ours:>10s}" for ours in OURS))
    for which, result in row["passes"].items():
        for name, r in result["contenders"].items():
            ratios = "".join(f"{r['times_of'][ours]:10.2f}" for ours in OURS)
            print(
                f"  {which:9s}{name:15s}{r['ms']:9.4f}{r['tflops']:9.1f}{r['gb_per_s']:7.0f}"
                f"{r['floor_share']:10.1%}{ratios}"
            )
        print(f"  {which:9s}{'floor':15s}{result['floor_ms']:9.4f}", flush=True)
    for name, reason in row["not_run"].items():
        print(f"  not run: {name}: {reason}")


def run(
    device: str, batch_size: int, rounds: int, seed: int, skip: Sequence[str] = ()
) -> dict[str, Any]:
    """All cases on "cuda", or a rehearsal on "cpu"."""
    timer = timers.CudaTimer() if device == "cuda" else timers.HostTimer()
    torch.manual_seed(seed)
    peaks = {"flops": timer.matmul_peak(torch.bfloat16), "bytes": timer.copy_peak()}
    print(f"peaks: {peaks['flops'] / 1e12:.1f} TFLOP/s bf16, {peaks['bytes'] / 1e9:.0f} GB/s")
    rows = []
    for case in attention_cases(batch_size, seed):
        if device == "cpu":
            small = tuple(max(n // 16, 1) for n in case.lengths)
            case = dataclasses.replace(case, lengths=small, heads=2)
        rows.append(measure(case, device, timer, peaks, rounds, skip))
        show(rows[-1])
    return {
        "dtype": "bfloat16",
        "l2": "emptied before every measurement" if device == "cuda" else "as it is",
        "time": "median of rounds in which contenders take turns",
        "rounds": rounds,
        "peaks": peaks,
        "results": rows,
    }


if __name__ == "__main__":
    try_alone(sys.argv[1], float(sys.argv[2]))
