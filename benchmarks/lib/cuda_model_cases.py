"""What the model of an SM is asked: batches, both implementations' passes over them, and published
figures that it is checked against."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from benchmarks.lib import flash_3_loop, triton_forward
from benchmarks.lib.encoder_steps import TOKENS, all_attention
from benchmarks.lib.gpu_rates import RANGES
from bert_unpad.batch import VarlenBatch
from bert_unpad.data.sampling.histogram import wikipedia_lengths
from gpu_model.sm import attention, attention_wgmma, flow
from gpu_model.sm.architectures import ARCHITECTURES
from gpu_model.sm.attention import Batch
from gpu_model.sm.kernel import Kernel, Launch, Model, Prediction, Stage
from gpu_model.sm.sass import Function

OURS, WGMMA, FLASH = "bert_unpad", "bert_unpad, wgmma", "FlashAttention-2"
# Matrix products of what a stage computes.
PRODUCTS = {"forward": 2, "backward": 5, "backward, dQ": 3, "backward, dK and dV": 4}
Pass = Callable[[Batch, float], list[Stage]]


def batch_of(lengths: list[int], heads: int = 16) -> Batch:
    """With the order and the groups that a call gets from VarlenBatch."""
    made = VarlenBatch.from_lengths(lengths)
    groups = tuple((len(group.sequences), group.max_seqlen) for group in made.groups)
    return Batch(tuple(lengths), heads, 64, tuple(made.order.tolist()), groups)


def wikipedia_mix(sequences: int) -> list[int]:
    """Lengths at evenly spaced quantiles of the Wikipedia histogram, in an order drawn once."""
    counts = np.asarray(wikipedia_lengths(), dtype=np.float64)
    shares = np.cumsum(counts) / counts.sum()
    at = (np.arange(sequences) + 0.5) / sequences
    lengths = np.searchsorted(shares, at)
    return np.random.default_rng(1).permutation(lengths).tolist()


def even_mix(sequences: int) -> list[int]:
    """A fifth of 512 tokens, the others evenly from 20 to 360, in an order drawn once."""
    full = round(0.2 * sequences)
    rest = sequences - full
    lengths = [512] * full + [20 + round(340 * (i + 0.5) / rest) for i in range(rest)]
    random.Random(1).shuffle(lengths)
    return lengths


def batches() -> dict[str, Batch]:
    return {
        "24 x 512": batch_of([512] * 24),
        "96 x 128": batch_of([128] * 96),
        "48 of Wikipedia": batch_of(wikipedia_mix(48)),
        "48 mixed": batch_of(even_mix(48)),
    }


def wide_batches() -> dict[str, Batch]:
    """The same with 8 heads of 128 columns."""
    return {name: replace(batch, heads=8, head_dim=128) for name, batch in batches().items()}


@dataclass(frozen=True)
class Published:
    """Speeds without dropout, sequences of one length, 32 heads of 64, 16k tokens; TFLOP/s."""

    direction: str  # forward or backward
    length: int
    value: float
    """FlashAttention-2's."""
    cudnn: float
    flash_3: float
    triton: float | None = None


# Shah et al., "FlashAttention-3", 2024, arXiv:2407.08608, figures 5 and 6: H100 80GB SXM5.
PUBLISHED = [
    Published("forward", 512, 282, 335, 333, 340),
    Published("forward", 1024, 306, 373, 392, 382),
    Published("forward", 2048, 318, 395, 460, 396),
    Published("backward", 512, 198, 266, 272),
    Published("backward", 1024, 238, 348, 363),
    Published("backward", 2048, 264, 395, 422),
]


def seconds(model: Model, stages: list[Stage]) -> tuple[float, list[Prediction]]:
    parts = [model.stage(stage) for stage in stages]
    return sum(part.seconds for part in parts), parts


def ranges(model: Model, stages: list[Stage]) -> dict[str, tuple[float, float]]:
    """Seconds at the slow and at the fast end of the GPUs that have the model's multiprocessors."""
    if model.architecture.name not in RANGES:
        return {}
    return {
        gpu: tuple(seconds(model.at(x.clock, x.memory, x.gap), stages)[0] for x in ends)
        for gpu, ends in RANGES.items()
    }


def check_published(
    model: Model,
    ours: dict[str, Any],
    flash: Any | None,
    loop: Kernel,
    triton: tuple[Kernel, int] | None,
) -> list[dict[str, Any]]:
    """Published figures beside the model's: TFLOP/s, and ranges of these. Without `flash`, those of
    FlashAttention-2's kernels are left out, and without `triton` Triton's. `loop` and `triton`:
    what flash_3_loop.py and triton_forward.py have compiled."""
    rows = []
    for point in PUBLISHED:
        batch = Batch((point.length,) * (16384 // point.length), 32)
        products = PRODUCTS[point.direction] * batch.products / 1e12
        row = asdict(point)
        if point.direction == "forward":
            runs = {"ours_range": attention_wgmma.forward(ours, batch, 0.0)}
            runs["loop_range"] = flash_3_loop.forward(loop, batch)
            if triton is not None:
                stages = triton_forward.forward(*triton, batch)
                row["triton_predicted"] = products / seconds(model, stages)[0]
        else:
            runs = {"ours_range": attention_wgmma.backward(ours, batch, 0.0, model.architecture)}
        if flash is not None:
            pass_of = flash.forward if point.direction == "forward" else flash.backward
            runs["predicted_range"] = pass_of(batch, 0.0, even=True)
            row["predicted"] = products / seconds(model, runs["predicted_range"])[0]
        for name, run in runs.items():
            row[name] = [products / end for end in ranges(model, run)["H100"]]
        rows.append(row)
    return rows


def encoders(model: Model, ours: dict[str, Any]) -> list[dict[str, Any]]:
    """What attention takes in the steps of benchmarks/lib/encoder_steps.py, with wgmma."""
    rows = []
    for kind in all_attention():
        lengths = (kind.length,) * (TOKENS // kind.length)
        batch = Batch(lengths, kind.heads, window=kind.window)
        forward = attention_wgmma.forward(ours, batch, 0.0)
        backward = attention_wgmma.backward(ours, batch, 0.0, model.architecture)
        found = {"forward_seconds": forward, "backward_seconds": backward}
        times = {name: seconds(model, stages)[0] for name, stages in found.items()}
        rows.append(kind._asdict() | times)
    return rows


def contenders_of(
    model: Model, ours: dict[str, Any], flash: Any | None
) -> dict[str, tuple[Pass, Pass]]:
    """Forward and backward pass of each implementation. On an H100 this package's kernels with
    wgmma, which it runs there, and those with mma.sync, which other GPUs run."""
    architecture = model.architecture
    contenders: dict[str, tuple[Pass, Pass]] = {
        OURS: (
            lambda batch, p: attention.forward(ours, batch, p),
            lambda batch, p: attention.backward(ours, batch, p, architecture),
        )
    }
    if architecture.capability == 90:
        contenders[WGMMA] = (
            lambda batch, p: attention_wgmma.forward(ours, batch, p),
            lambda batch, p: attention_wgmma.backward(ours, batch, p, architecture),
        )
    if flash is not None:
        contenders[FLASH] = (flash.forward, flash.backward)
    return contenders


def passes(
    model: Model, ours: dict[str, Any], flash: Any | None, of: dict[str, Batch]
) -> list[dict[str, Any]]:
    """Times of both passes of each implementation for these batches, with and without dropout."""
    architecture, contenders = model.architecture, contenders_of(model, ours, flash)
    rows = []
    for name, batch in of.items():
        for dropout_p in (0.0, 0.1):
            for contender, (forward, backward) in contenders.items():
                times: dict[str, Any] = {}
                for label, run in (("forward", forward), ("backward", backward)):
                    stages = run(batch, dropout_p)
                    total, parts = seconds(model, stages)
                    times[f"{label}_ranges"] = ranges(model, stages)
                    times[f"{label}_seconds"] = total
                    main = max(parts, key=lambda part: part.seconds)
                    times[f"{label}_bound"] = main.bound
                    used = (stage.launches[0].kernel.registers for stage in stages)
                    times[f"{label}_registers"] = list(used)
                row = {"architecture": architecture.name, "batch": name, "dropout_p": dropout_p}
                rows.append(row | {"contender": contender, "products": batch.products} | times)
    return rows


def blocks(model: Model, ours: dict[str, Any], flash: Any | None) -> list[dict[str, Any]]:
    """Blocks of full tiles: their main loop, and cycles with as many on an SM as fit."""
    architecture, rows = model.architecture, []
    for length in (128, 512):
        batch = batch_of([length] * 24)
        for dropout_p in (0.0, 0.1):
            found = [
                (contender, stage)
                for contender, both in contenders_of(model, ours, flash).items()
                for run in both
                for stage in run(batch, dropout_p)
            ]
            for contender, stage in found:
                for launch in stage.launches:
                    row = {"architecture": architecture.name, "contender": contender}
                    row |= {"direction": stage.name, "length": length, "dropout_p": dropout_p}
                    rows.append(row | _block(model, batch, stage.name, launch))
    return rows


def _block(model: Model, batch: Batch, stage: str, launch: Launch) -> dict[str, Any]:
    ((kind, _),) = Counter(launch.kinds).most_common(1)
    result, trace = model.block(launch, kind), launch.walk(launch.examples[kind])
    function = launch.kernel.function
    counts = np.bincount(trace[0].code, minlength=len(function.instructions)).tolist()
    loop = flow.main_loop(function, counts)
    flops = PRODUCTS[stage] * batch.products / len(launch.kinds)
    return {
        "instructions": len(trace[0].code),
        "loop": flow.describe(function, loop, counts) if loop else "none",
        "trips": counts[loop.header] if loop else 0,
        "blocks_per_sm": model.occupancy(launch).blocks,
        "cycles": result.cycles,
        "flop_per_cycle": flops / result.cycles,
        "bound": result.bound,
        "busy": {pipe: round(busy / result.cycles, 3) for pipe, busy in result.busy.items()},
        "opcodes": _opcodes(function, counts, loop),
    }


def _opcodes(function: Function, counts: list[int], loop: flow.Loop | None) -> dict[str, float]:
    """How often a warp executes each kind of instruction in one pass of its main loop."""
    if loop is None:
        return {}
    graph, found = flow.basic_blocks(function), Counter()
    for block in loop.blocks:
        for i in range(graph[block].first, graph[block].last + 1):
            found[function.instructions[i].name] += counts[i]
    return {name: round(n / counts[loop.header], 1) for name, n in found.most_common() if n}


def constants() -> dict[str, Any]:
    return {name: asdict(architecture) for name, architecture in ARCHITECTURES.items()}
