"""Audits plans: predicted against published throughput of encoders' training runs.

    python -m benchmarks.check_published          # a minute; no GPU is needed
    python -m benchmarks.check_published --fit    # fits the constants again, and prints them

Every second row of benchmarks/lib/published_runs.json, and this package's own measurements on one
GPU, were used to fit the constants of the cost models (`PRODUCTS_SHARE`, `RATES`, `HIDDEN`,
`SLOWING`); the other half was not. Both halves have runs of the same sources, so an error on the
other half is that of a further run of such software, not of any. Aims: a median error of 10 %, a
worst of 25 %. Writes benchmarks/results/model/published.json and published.png.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.lib import harness
from benchmarks.lib.published import RUNS, measured_here, predict
from bert_unpad._plots import new_figure, save_figure
from bert_unpad.costs import kernels, links
from bert_unpad.costs.cards import PRODUCTS_SHARE

MEDIAN, WORST = 0.10, 0.25
"""Aims."""
_OWN_WEIGHT = 3  # of one of this package's measurements in the fit, against a published run


def half_of(number: int) -> str:
    """Which half of the rows a row belongs to."""
    return "shown" if number % 2 else "fitted"


def rows() -> list[dict[str, Any]]:
    """Each published run with what a plan predicts of it."""
    found = []
    for number, run in enumerate(RUNS):
        published, predicted = run["sequences_per_second"], predict(run)
        about = {name: run[name] for name in ("name", "source", "says", "gpus", "card")}
        figures = {"published": published, "predicted": predicted}
        error = {"error": predicted / published - 1}
        found.append(about | {"half": half_of(number)} | figures | error)
    return found


def summary(errors: Sequence[float]) -> dict[str, float]:
    """Count, median, the error that 9 of 10 do not exceed, and the greatest."""
    sizes = sorted(abs(error) for error in errors)
    most = sizes[math.ceil(0.9 * len(sizes)) - 1]
    median = statistics.median(sizes)
    return {"runs": len(sizes), "median": median, "most": most, "worst": sizes[-1]}


def sources(found: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows by who published them: the part of the name before the first comma."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in found:
        first = row["name"].split(",")[0].split(" v")[0]
        groups.setdefault(first, []).append(row)
    return groups


def _share(first: tuple[int, int], width: str) -> tuple[Callable[[], float], Callable[..., None]]:
    shares = PRODUCTS_SHARE[first]
    return (lambda: shares[width]), (lambda value: shares.__setitem__(width, value))


def _rate(name: str) -> tuple[Callable[[], float], Callable[..., None]]:
    def put(value: float) -> None:
        kernels.RATES = kernels.RATES._replace(**{name: value})

    return (lambda: getattr(kernels.RATES, name)), put


def _link(name: str) -> tuple[Callable[[], float], Callable[..., None]]:
    return (lambda: getattr(links, name)), (lambda value: setattr(links, name, value))


CONSTANTS = {
    "PRODUCTS_SHARE, A100, 16 bits": _share((7, 0), "16bit"),
    "PRODUCTS_SHARE, H100, 16 bits": _share((9, 0), "16bit"),
    "PRODUCTS_SHARE, H100, 8 bits": _share((9, 0), "8bit"),
    "PRODUCTS_SHARE, B200, 8 bits": _share((10, 0), "8bit"),
    "RATES.attention": _rate("attention"),
    "RATES.kernel": _rate("kernel"),
    "HIDDEN": _link("HIDDEN"),
    "SLOWING": _link("SLOWING"),
}


def _loss() -> float:
    """Mean of the absolute logarithms of predicted over real throughput."""
    fitted = [run for number, run in enumerate(RUNS) if half_of(number) == "fitted"]
    errors = [abs(math.log(predict(run) / run["sequences_per_second"])) for run in fitted]
    own = [abs(math.log1p(row["error"])) for row in measured_here()]
    total = sum(errors) + _OWN_WEIGHT * sum(own)
    return total / (len(errors) + _OWN_WEIGHT * len(own))


def fit(rounds: int = 6, step: float = 0.12) -> dict[str, float]:
    """Changes one constant after another while that makes the loss smaller; returns them all."""
    best = _loss()
    for _ in range(rounds):
        for (get, put), sign in product(CONSTANTS.values(), (-1, 1)):
            before = get()
            put(before * (1 + sign * step))
            loss = _loss()
            if loss < best:
                best = loss
            else:
                put(before)
        step *= 0.75
    return {name: get() for name, (get, _) in CONSTANTS.items()}


def plot(found: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws predicted against published throughput, with lines at the aim of the worst error."""
    figure = new_figure(7, 6)
    axes = figure.subplots()
    ends = [min(row["published"] for row in found) / 2, max(row["published"] for row in found) * 2]
    axes.plot(ends, ends, color="0.4", linewidth=0.8)
    for sign in (1 + WORST, 1 - WORST):
        axes.plot(ends, [sign * end for end in ends], color="0.7", linewidth=0.8, linestyle="--")
    for color, (name, group) in enumerate(sources(found).items()):
        for half, filled in (("fitted", False), ("shown", True)):
            points = [row for row in group if row["half"] == half]
            axes.scatter(
                [row["published"] for row in points],
                [row["predicted"] for row in points],
                s=28,
                edgecolors=f"C{color}",
                facecolors=f"C{color}" if filled else "none",
                label=f"{name}, {half}" if points else None,
            )
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set_xlabel("published, sequences/s")
    axes.set_ylabel("predicted, sequences/s")
    axes.set_title(f"{len(found)} published runs; dashed: {WORST:.0%} off")
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="fit constants, print them, no more")
    harness.add_name(parser, "published")
    options = parser.parse_args()
    if options.fit:
        for name, value in fit().items():
            print(f"{name:<32}{value:.4g}")
        return
    found, own = rows(), measured_here()
    for row in found:
        print(f"{row['error']:>+8.1%}  {row['half']:<8}{row['name']}")
    for row in own:
        print(f"{row['error']:>+8.1%}  measured {row['name']}")
    halves = {
        half: [r["error"] for r in found if r["half"] == half] for half in ("fitted", "shown")
    }
    summaries = {half: summary(errors) for half, errors in halves.items()}
    payload = {
        "what": "throughput that plans predict, beside published throughput",
        "aims": {"median": MEDIAN, "worst": WORST},
        "constants": {name: get() for name, (get, _) in CONSTANTS.items()},
        "halves": summaries | {"all": summary([row["error"] for row in found])},
        "sources": {
            name: summary([row["error"] for row in group]) for name, group in sources(found).items()
        },
        "runs": found,
        "measured_here": own,
    }
    print(payload["halves"])
    path = harness.save(options.name, "model", harness.command(), payload)
    plot(found, path.with_suffix(".png"))
    print(f"written: {path}")


if __name__ == "__main__":
    main()
