"""The options of `python -m bert_unpad.simulate`, and the models and lengths they stand for."""

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bert_unpad._arguments import above_zero, names_of, not_below_zero, not_negative, positive
from bert_unpad.costs.compute import ComputeCost
from bert_unpad.costs.gradient_buckets import num_parameters
from bert_unpad.costs.inputs import model_config
from bert_unpad.costs.network import Cluster, Link
from bert_unpad.costs.overlap import Overlap
from bert_unpad.costs.step import TYPICAL_FLOPS, StepModel
from bert_unpad.data.sampling.histogram import all_lengths, sample_lengths
from bert_unpad.nn.config import PRESETS
from bert_unpad.simulate.epoch import STRATEGIES

_MAX_SAMPLES = 2**32 - 2  # the balancer's indices have 32 bits
_WIRE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def make_parser() -> argparse.ArgumentParser:
    """The command's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m bert_unpad.simulate",
        description="Deals an epoch to all ranks and reports the straggler efficiency (mean work "
        "over greatest work of a rank, per step) and the projected time of a step, from 8 to 16,384"
        " ranks. 'random' is training without load balancing.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    setup = parser.add_argument_group("setup")
    setup.add_argument("--ranks", type=positive, help="number of ranks")
    setup.add_argument("--batch", type=positive, help="examples per rank and step")
    setup.add_argument(
        "--strategy",
        type=names_of(STRATEGIES),
        default="stratified,random",
        help="comma-separated, of: " + ", ".join(STRATEGIES),
    )
    setup.add_argument(
        "--rank-speeds",
        type=_speeds,
        metavar="SPEED[,...]",
        help="of ranks that differ, as multiples of --tflops: those of the ranks in turn, over and "
        "over (1,1,0.5)",
    )
    setup.add_argument(
        "--histogram",
        default="wikipedia",
        help="'wikipedia'; a text file whose line i is the number of sequences of length i; or a "
        "folder of prepared data, whose training examples are counted",
    )
    setup.add_argument(
        "--samples",
        type=_samples,
        default=2**20,
        help="examples to draw from the histogram, or 'all' for exactly those it counts",
    )
    setup.add_argument(
        "--pool-steps", type=positive, default=64, help="steps that are balanced together"
    )
    setup.add_argument(
        "--seed",
        type=not_negative,
        default=0,
        help="of the drawn lengths and of their order",
    )

    cost = parser.add_argument_group("what computing costs")
    cost.add_argument(
        "--model",
        default="bert-large",
        help=f"one of {', '.join(PRESETS)}, or a config.json in Hugging Face's layout",
    )
    cost.add_argument(
        "--tflops",
        type=above_zero,
        default=TYPICAL_FLOPS / 1e12,
        help="10^12 model FLOP/s that a rank sustains in training",
    )
    cost.add_argument(
        "--cost",
        metavar="FILE|LINEAR,QUADRATIC[,FIXED]",
        help="instead of --tflops: what --fit has written, or seconds per token, per token squared "
        "and per step",
    )
    cost.add_argument(
        "--fit",
        type=Path,
        metavar="FILE",
        help="time the model's training step on this machine at several lengths first, write the "
        "fitted cost here, and use it",
    )
    cost.add_argument("--device", default="cpu", help="for --fit: cpu or cuda")
    cost.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="for --fit")

    network = parser.add_argument_group("what communication costs")
    cluster = Cluster()
    network.add_argument(
        "--ranks-per-node",
        type=positive,
        default=cluster.ranks_per_node,
        help="also the neighbouring ranks that exchange examples in '/node/' strategies",
    )
    for name, link, where in (
        ("node", cluster.node, "within a node"),
        ("network", cluster.network, "between nodes"),
    ):
        network.add_argument(
            f"--{name}-latency",
            type=not_below_zero,
            default=link.latency * 1e6,
            help=f"microseconds of a message {where}",
        )
        network.add_argument(
            f"--{name}-bandwidth",
            type=above_zero,
            default=link.bandwidth / 1e9,
            help=f"GB/s of a rank in each direction {where}",
        )
    network.add_argument(
        "--allreduce",
        choices=("best", "ring", "tree"),
        default=cluster.algorithm,
        help="algorithm between nodes",
    )
    network.add_argument(
        "--wire", choices=tuple(_WIRE_BYTES), default="fp32", help="type gradients travel in"
    )
    network.add_argument(
        "--bucket-mb", type=above_zero, default=25.0, help="MiB of gradients reduced together"
    )
    network.add_argument(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="reduce gradients while the backward pass goes on",
    )

    output = parser.add_argument_group("output")
    output.add_argument(
        "--scaling",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="project 8 to 16,384 ranks too",
    )
    output.add_argument("--json", action="store_true", help="print JSON instead of tables")
    output.add_argument("--plot", type=Path, metavar="FILE", help="write a plot (png, pdf, svg)")
    return parser


def step_model(options: argparse.Namespace, fitted: ComputeCost | None, longest: int) -> StepModel:
    """The costs that the options describe, with `fitted` instead of the computing's if given.

    Args:
        longest: tokens of the longest sequence.

    Raises:
        OSError, ValueError: the model or cost file cannot be read or is none.
    """
    config = model_config(options.model)
    if fitted is not None:
        cost = fitted
    elif options.cost is not None:
        cost = _cost(options.cost)
    else:
        cost = ComputeCost.from_rate(config, options.tflops * 1e12, longest)
    return StepModel(
        cost=cost,
        cluster=Cluster(
            ranks_per_node=options.ranks_per_node,
            node=Link(options.node_latency * 1e-6, options.node_bandwidth * 1e9),
            network=Link(options.network_latency * 1e-6, options.network_bandwidth * 1e9),
            algorithm=options.allreduce,
        ),
        overlap=Overlap(
            gradient_bytes=_WIRE_BYTES[options.wire] * num_parameters(config),
            bucket_bytes=options.bucket_mb * 2**20,
            overlapped=options.overlap,
        ),
    )


def take_lengths(options: argparse.Namespace, counts: NDArray[np.int64]) -> NDArray[np.uint16]:
    """The lengths of the epoch to simulate: drawn, or exactly those counted.

    Raises:
        ValueError: they are too many for the balancer.
    """
    samples = int(counts.sum()) if options.samples is None else options.samples
    if samples > _MAX_SAMPLES:
        raise ValueError(f"argument --samples: expected at most {_MAX_SAMPLES}, got {samples}")
    if options.samples is None:
        return all_lengths(counts)
    return sample_lengths(options.samples, options.seed, counts)


def _cost(text: str) -> ComputeCost:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    try:
        if 2 <= len(values) <= 3:
            return ComputeCost(*values)
        return ComputeCost.load(text)
    except (OSError, ValueError) as error:
        raise ValueError(f"argument --cost: {error}") from error


def _speeds(text: str) -> list[float]:
    return [above_zero(part) for part in text.split(",")]


def _samples(text: str) -> int | None:
    return None if text == "all" else positive(text)
