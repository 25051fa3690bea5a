"""Command line of the load-balancing simulation: arguments in, a table, JSON or a plot out."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bert_unpad._planner import WorkModel
from bert_unpad.data.histogram import (
    all_lengths,
    read_histogram,
    sample_lengths,
    wikipedia_lengths,
)
from bert_unpad.simulate.epoch import STRATEGIES, SimulationResult, simulate
from bert_unpad.simulate.plot import plot_efficiency

__all__ = ["main"]

_MAX_SAMPLES = 2**32 - 2  # the planner's indices have 32 bits


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status. Bad arguments exit with 2 and a message."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        lengths = _lengths(options)
        results = [
            simulate(
                lengths,
                options.ranks,
                options.batch,
                strategy,
                seed=options.seed,
                work=WorkModel.for_hidden(options.hidden),
                pool_steps=options.pool_steps,
                exchange_ranks=options.exchange_ranks,
            )
            for strategy in options.strategy
        ]
        if options.plot is not None:
            plot_efficiency(results, options.plot)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        parser.error(str(error))
    if options.json:
        print(json.dumps({"results": [_as_dict(result) for result in results]}, indent=2))
    else:
        print(_table(results))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bert_unpad.simulate",
        description="Plans an epoch for all ranks and reports the straggler efficiency: mean work "
        "over greatest work of a rank, per step. 'random' is training without load balancing.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--ranks", type=_positive, required=True, help="number of ranks")
    parser.add_argument("--batch", type=_positive, required=True, help="examples per rank and step")
    parser.add_argument(
        "--strategy",
        type=_strategies,
        default="stratified,random",
        help="comma-separated, of: " + ", ".join(STRATEGIES),
    )
    parser.add_argument(
        "--histogram",
        default="wikipedia",
        help="'wikipedia', or a text file whose line i is the number of sequences of length i",
    )
    parser.add_argument(
        "--samples",
        type=_samples,
        default=2**20,
        help="examples to draw from the histogram, or 'all' for exactly those it counts",
    )
    parser.add_argument(
        "--hidden",
        type=_positive,
        default=1024,
        help="hidden size of the model, for the cost of attention relative to the linear layers",
    )
    parser.add_argument(
        "--pool-steps", type=_positive, default=64, help="steps that are balanced together"
    )
    parser.add_argument(
        "--exchange-ranks",
        type=_positive,
        default=8,
        help="neighbouring ranks that exchange examples in '/group/' strategies",
    )
    parser.add_argument("--seed", type=_not_negative, default=0, help="of the draw and the plan")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a plot (png, pdf, svg)")
    return parser


def _lengths(options: argparse.Namespace) -> NDArray[np.uint16]:
    if options.histogram == "wikipedia":
        histogram = wikipedia_lengths()
    else:
        try:
            histogram = read_histogram(options.histogram)
        except (OSError, ValueError) as error:
            raise ValueError(f"argument --histogram: {error}") from error
    samples = int(histogram.sum()) if options.samples is None else options.samples
    if samples > _MAX_SAMPLES:
        raise ValueError(f"argument --samples: expected at most {_MAX_SAMPLES}, got {samples}")
    if options.samples is None:
        return all_lengths(histogram)
    return sample_lengths(options.samples, options.seed, histogram)


def _as_dict(result: SimulationResult) -> dict[str, object]:
    values = asdict(result)
    del values["per_step"]
    return values


def _table(results: Sequence[SimulationResult]) -> str:
    first = results[0]
    lines = [
        f"{first.ranks:,} ranks x {first.batch}, {first.samples:,} examples, {first.steps:,} steps",
        f"real tokens: {first.fill_padded:.2%} if padded to the longest, {first.fill_packed:.2%} "
        "if packed into rows of that length; all of them if neither",
        "",
        f"{'strategy':<20}{'efficiency':>12}{'5th pct':>10}{'worst':>10}{'seconds':>10}",
    ]
    lines += [
        f"{result.strategy:<20}{result.efficiency:>12.5f}{result.efficiency_p5:>10.5f}"
        f"{result.efficiency_min:>10.5f}{result.seconds:>10.2f}"
        for result in results
    ]
    return "\n".join(lines)


def _integer(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value < 2**31:
        raise argparse.ArgumentTypeError(f"expected an integer of {least} or more, got {text!r}")
    return value


def _positive(text: str) -> int:
    return _integer(text, 1)


def _not_negative(text: str) -> int:
    return _integer(text, 0)


def _samples(text: str) -> int | None:
    return None if text == "all" else _integer(text, 1)


def _strategies(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in STRATEGIES:
            raise argparse.ArgumentTypeError(
                f"expected a comma-separated list of {', '.join(STRATEGIES)}, got {name!r}"
            )
    return names
