"""Times operators whose floor is memory traffic: their GB/s beside the device's own copy.

A case says what each pass must move at least and who competes. Runs on a GPU; a rehearsal runs the
same code on a CPU with small inputs, where its times mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib import timers

PASSES = ("forward", "backward", "both")
OURS = "bert_unpad"
# bf16 keeps 8 bits; a contender beyond this computes something else.
LARGEST_ERROR = 0.02


@dataclass(frozen=True)
class Contender:
    """`forward` returns what `backward` needs, the output first; `backward` returns gradients."""

    forward: Callable[[], tuple[Any, ...]]
    backward: Callable[[tuple[Any, ...]], Sequence[Tensor]]


@dataclass(frozen=True)
class Case:
    """One operator at one size.

    `contenders` has `OURS`, under which other contenders' times are shown. `make` of a contender
    compiles what is compiled. `reference` has an output and its gradients, in fp32 or better.
    Contenders that draw dropout masks of their own cannot be compared with it; `checked` has them
    without dropout.
    """

    name: str
    bytes: dict[str, int]  # that "forward" and "backward" must read and write at least
    contenders: dict[str, Callable[[], Contender]]
    reference: Contender
    checked: Mapping[str, Callable[[], Contender]] = field(default_factory=dict)


def by_autograd(function: Callable[..., Tensor], inputs: Sequence[Tensor], dy: Tensor) -> Contender:
    """A contender that is a function of `inputs`, for those that PyTorch differentiates."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    return Contender(
        lambda: (function(*leaves),),
        lambda saved: torch.autograd.grad(saved[0], leaves, dy, retain_graph=True),
    )


def compiled(function: Callable[..., Tensor], device: str) -> Callable[..., Tensor]:
    """By torch.compile; for a rehearsal without generating code, which would take a minute.

    Backward passes are timed again and again on one forward pass, so they must not take its buffers
    for their own.
    """
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False
    return torch.compile(function, backend="inductor" if device == "cuda" else "aot_eager")


def errors(contender: Contender, reference: Sequence[Tensor]) -> list[float]:
    """|x - reference| / |reference| of the output and each gradient."""
    saved = contender.forward()
    found = [saved[0], *contender.backward(saved)]
    return [
        ((x.detach().float() - y).norm() / y.norm()).item()
        for x, y in zip(found, reference, strict=True)
    ]


def enter(case: Case) -> tuple[dict[str, Contender], dict[str, list[float]], dict[str, str]]:
    """The contenders that give right results, their errors, and why the others do not run."""
    saved = case.reference.forward()
    reference = [x.detach().float() for x in (saved[0], *case.reference.backward(saved))]
    entered, found, missing = {}, {}, {}
    for name, make in case.contenders.items():
        try:
            contender = make()
            error = errors(case.checked[name]() if name in case.checked else contender, reference)
            reason = "" if max(error) <= LARGEST_ERROR else f"wrong result: {error}"  # NaN is wrong
        except RuntimeError as problem:
            reason = str(problem).strip().split("\n")[0][:160]
        if not reason:
            entered[name], found[name] = contender, error
        elif name.startswith(OURS):
            raise SystemExit(f"{case.name}, our own {name!r} does not run: {reason}")
        else:
            missing[name] = reason
    return entered, found, missing


def measure(case: Case, timer: timers.Timer, copy_peak: float, rounds: int) -> dict[str, Any]:
    """One case's row of the report."""
    contenders, found, missing = enter(case)
    timings = timers.interleave(timer, timers.steps(contenders), rounds, warmup=3)
    passes = {}
    for which in PASSES:
        parts = ("forward", "backward") if which == "both" else (which,)
        moved = sum(case.bytes[part] for part in parts)
        seconds = {name: timings[f"{which}/{name}"].median for name in contenders}
        passes[which] = {
            "floor_ms": moved / copy_peak * 1e3,
            "contenders": {
                name: {
                    "ms": t * 1e3,
                    "gb_per_s": moved / t / 1e9,
                    "copy_share": moved / t / copy_peak,
                    "times_of_ours": t / seconds[OURS],
                }
                for name, t in seconds.items()
            },
        }
    return {"case": case.name, "not_run": missing, "errors": found, "passes": passes}


def show(row: dict[str, Any]) -> None:
    print(f"\n{row['case']}")
    print(f"  {'':9s}{'':30s}{'ms':>9s}{'GB/s':>7s}{'of copy':>9s}{'/ ours':>8s}")
    for which, result in row["passes"].items():
        for name, r in result["contenders"].items():
            print(
                f"  {which:9s}{name:30s}{r['ms']:9.4f}{r['gb_per_s']:7.0f}{r['copy_share']:9.1%}"
                f"{r['times_of_ours']:8.2f}",
                flush=True,
            )
    for name, reason in row["not_run"].items():
        print(f"  not run: {name}: {reason}")


def run(
    cases: Callable[[str], Iterable[Case]], device: str, rounds: int, seed: int
) -> dict[str, Any]:
    """All cases on "cuda", or a rehearsal on "cpu". `cases` makes them for one of the two."""
    timer = timers.CudaTimer() if device == "cuda" else timers.HostTimer()
    torch.manual_seed(seed)
    copy_peak = timer.copy_peak()
    print(f"peak: {copy_peak / 1e9:.0f} GB/s, device-to-device copy")
    rows = []
    for case in cases(device):
        rows.append(measure(case, timer, copy_peak, rounds))
        show(rows[-1])
    return {
        "dtype": "bfloat16",
        "l2": "emptied before every measurement" if device == "cuda" else "as it is",
        "time": "median of rounds in which contenders take turns",
        "bytes": "operands and results once each, whatever a contender really moves",
        "rounds": rounds,
        "peaks": {"bytes": copy_peak},
        "results": rows,
    }
