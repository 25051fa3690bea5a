"""Command line of the load-balancing simulation: arguments in, tables, JSON or a plot out."""

import argparse
import json
import platform
from collections.abc import Sequence

from bert_unpad.costs.compute import ComputeCost
from bert_unpad.costs.inputs import model_config, read_counts
from bert_unpad.costs.step import StepModel
from bert_unpad.simulate.epoch import Fill, SimulationResult, simulate
from bert_unpad.simulate.options import make_parser, step_model, take_lengths
from bert_unpad.simulate.plot import plot_results
from bert_unpad.simulate.scaling import scaling_curve


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status. Bad arguments exit with 2 and a message."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    missing = [f"--{name}" for name in ("ranks", "batch") if getattr(options, name) is None]
    if missing and not (options.fit and len(missing) == 2):
        parser.error(f"the following arguments are required: {', '.join(missing)}")
    try:
        fitted = _fit(options) if options.fit else None
        if missing:
            return 0
        counts = read_counts(options.histogram, "--histogram")
        model = step_model(options, fitted, len(counts) - 1)
        lengths = take_lengths(options, counts)
        common = {"seed": options.seed, "pool_steps": options.pool_steps, "model": model}
        common["speeds"] = options.rank_speeds
        results = [
            simulate(lengths, options.ranks, options.batch, strategy, **common)
            for strategy in options.strategy
        ]
        curve = []
        if options.scaling:
            curve = scaling_curve(counts, options.batch, options.strategy, **common)
        if options.plot is not None:
            plot_results(results, curve, options.plot)
    except (OSError, RuntimeError, ValueError, ModuleNotFoundError) as error:
        parser.error(str(error))
    fill = Fill.of(lengths)
    if options.json:
        print(json.dumps(_as_dict(options, len(lengths), fill, model, results, curve), indent=2))
    else:
        print(_tables(len(lengths), fill, results, curve))
    return 0


def _fit(options: argparse.Namespace) -> ComputeCost:
    import torch

    from bert_unpad.costs.timing import fit_step_cost

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.precision]
    cost, timings = fit_step_cost(model_config(options.model), device=options.device, dtype=dtype)
    name = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    about = {
        "model": options.model,
        "precision": options.precision,
        "device": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    cost.save(options.fit, **about, timings=timings)
    return cost


def _as_dict(
    options: argparse.Namespace,
    samples: int,
    fill: Fill,
    model: StepModel,
    results: Sequence[SimulationResult],
    curve: Sequence[SimulationResult],
) -> dict[str, object]:
    return {
        "setup": {
            "ranks": options.ranks,
            "batch": options.batch,
            "samples": samples,
            "histogram": options.histogram,
            "model": options.model,
            **model.to_dict(),
        },
        "fill_padded": fill.padded,
        "fill_packed": fill.packed,
        "results": [result.to_dict() for result in results],
        "scaling": [result.to_dict() for result in curve],
    }


def _tables(
    samples: int, fill: Fill, results: Sequence[SimulationResult], curve: Sequence[SimulationResult]
) -> str:
    first = results[0]
    lines = [
        f"{first.ranks:,} ranks x {first.batch}, {samples:,} examples, {first.steps:,} steps",
        f"real tokens: {fill.padded:.2%} if padded to the longest, {fill.packed:.2%} "
        "if packed into rows of that length; all of them if neither",
        "",
        f"{'strategy':<20}{'efficiency':>12}{'5th pct':>10}{'worst':>10}{'variation':>11}"
        f"{'exchange KB':>13}{'step ms':>11}{'dealt in s':>14}",
    ]
    lines += [
        f"{result.strategy:<20}{result.efficiency:>12.5f}{result.efficiency_p5:>10.5f}"
        f"{result.efficiency_min:>10.5f}{result.work_variation:>11.3f}"
        f"{result.exchange_bytes / 1e3:>13,.1f}{result.step_time.total * 1e3:>11,.2f}"
        f"{result.deal_seconds:>14.2f}"
        for result in results
    ]
    if curve:
        lines += [
            "",
            "projected milliseconds of a step, and throughput relative to ranks that never wait",
            f"{'strategy':<20}{'ranks':>8}{'compute':>11}{'straggler':>11}{'allreduce':>11}"
            f"{'exchange':>11}{'step':>11}{'relative':>10}{'sequences/s':>14}",
        ]
        for strategy in dict.fromkeys(result.strategy for result in curve):
            lines += [_scaling_line(result) for result in curve if result.strategy == strategy]
    return "\n".join(lines)


def _scaling_line(result: SimulationResult) -> str:
    step = result.step_time
    parts = (step.compute, step.straggler, step.allreduce, step.exchange, step.total)
    return (
        f"{result.strategy:<20}{result.ranks:>8,}"
        + "".join(f"{seconds * 1e3:>11,.2f}" for seconds in parts)
        + f"{step.scaling_efficiency:>10.4f}{step.sequences_per_second:>14,.0f}"
    )
