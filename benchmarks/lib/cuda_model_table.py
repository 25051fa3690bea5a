"""The page docs/development/cuda-model.md, from what benchmarks/cuda_model.py predicts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.lib import triton_forward
from benchmarks.lib.cuda_model_cases import FLASH, OURS, WGMMA
from benchmarks.lib.gpu_rates import RANGES
from benchmarks.lib.report import between, commands, table

Rows = list[dict[str, Any]]
INSTRUCTIONS = {OURS: "mma.sync", WGMMA: "wgmma"}  # that a contender multiplies by

HEAD = """\
# Attention's speed by a model

**Modelled, not measured.** The [model of an SM](../../gpu_model/README.md#the-model-of-an-sm) \
goes through the machine code that nvcc made; what it can and cannot show is said there. \
Figures are for bf16 and, but for one table, head dimension 64. nvcc {nvcc}. Written by

{command}

Figures for an H100 and an H200 are ranges, between a slow and a fast end of what the model takes \
for a constant, assumed: clock {clock} GHz, memory {memory} TB/s on an H100 and {memory_200} on an \
H200, {gap} us between two kernels. Those for an A100 are at the model's own constants, which no \
published kernel has been compared with. A range does not cover what the model leaves out: of \
the rates at its own constants an H100 has [measured](../benchmarks.md#on-a-gpu) 0.67 to 0.71 in \
both passes with wgmma, which is below the slow end, and 0.84 to 0.96 with FlashAttention-2.
"""
PASSES = """\
## Whole passes

16 heads, with dropout probability p. An H100 runs the kernels with wgmma, but backward those with \
mma.sync where the longest sequence has 65 to 128 tokens; an A100 runs these everywhere. "Of \
Wikipedia": lengths at even \
quantiles of its histogram; "mixed": a fifth of 512 tokens, the others evenly from 20 to 360. \
Times include memory traffic and launches. The last columns compare with \
FlashAttention-2{version} as its own build makes it, forward + backward. FlashAttention-3 and \
cuDNN are not in the model: their published speeds stand [below](#published-figures).
"""
WIDE = """\
## Heads of 128 columns

The same batches with 8 heads of 128 columns on an H100, by the kernels that it takes (wgmma) and \
by those of other GPUs (mma.sync): one forward and two backward. Registers: of a thread of each, \
for the longest sequences; no kernel spills any.
"""
BLOCKS = """\
## Blocks

One block of full tiles with as many others on the SM as fit. Cycles are its share of the SM's \
time; `busy` is the pipe that is busy most, and how much of the time. TFLOP/s: of a GPU that is \
full of them, without memory traffic. The last column compares with FlashAttention-2's kernel.
"""
PUBLISHED = """\
## Published figures

TFLOP/s on an H100, without dropout, sequences of one length, 32 heads, 16,384 tokens: figures 5 \
and 6 of Shah et al., "FlashAttention-3" (arXiv:2407.08608), who fixed the clock at 1.83 GHz, with \
cuDNN 9.1.1; and in the model FlashAttention-2's kernels, at its own constants and as a range, and \
this package's with wgmma. Four constants of the model were fitted with the figures of \
FlashAttention-2 in view, so they are no independent check.

**The backward pass has no published check**: no published backward kernel with wgmma has been \
compared with the model. Of forward passes one like FlashAttention-3's has been \
([here](../../gpu_model/README.md#the-model-of-an-sm)): the model is 13 and 19 % too fast. The \
column "in its way" has that kernel, which takes whole tiles of keys only: a warp that copies, \
tiles of 128 keys, and products that are begun before exponentials.
"""
TRITON = """\
An independent check is a forward kernel that Triton {version} compiles \
([triton_kernel.py](../../benchmarks/lib/triton_kernel.py), which also multiplies by wgmma), for \
which nothing was fitted, beside that paper's figures of Triton:
"""


def _seconds(row: dict[str, Any], gpu: str) -> dict[str, list[float]]:
    """Of each pass and of both, at each end of a range; at the model's constants without one."""
    found = {
        name: row[f"{name}_ranges"].get(gpu) or [row[f"{name}_seconds"]]
        for name in ("forward", "backward")
    }
    return found | {"both": [sum(ends) for ends in zip(*found.values(), strict=True)]}


def _rates(row: dict[str, Any], products: int, seconds: list[float]) -> str:
    return between([products * row["products"] / x / 1e12 for x in seconds], 0)


def _passes(rows: Rows) -> Iterable[list[str]]:
    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["architecture"], row["batch"], row["dropout_p"]

    others = {key(row): row for row in rows if row["contender"] == FLASH}
    for gpu in ("H100", "H200", "A100"):
        for row in rows:
            contender, other = row["contender"], others.get(key(row))
            known = gpu in (row["architecture"], *row["forward_ranges"])
            if not known or contender not in INSTRUCTIONS or (gpu, contender) == ("H200", OURS):
                continue
            seconds = _seconds(row, gpu)
            cells = [gpu, INSTRUCTIONS[contender], row["batch"], f"{row['dropout_p']:g}"]
            for name in ("forward", "backward"):
                cells.append(between([1e6 * x for x in seconds[name]], 0))
            for name, products in (("forward", 2), ("backward", 5), ("both", 7)):
                cells.append(_rates(row, products, seconds[name]))
            if other is None:
                yield [*cells, "-", "-"]
                continue
            theirs = _seconds(other, gpu)["both"]
            ratios = [a / b for a, b in zip(theirs, seconds["both"], strict=True)]
            yield [*cells, _rates(other, 7, theirs), between(ratios)]


def _wide(rows: Rows) -> Iterable[list[str]]:
    """mma.sync, then wgmma, of each batch."""
    for other, row in zip(rows[::2], rows[1::2], strict=True):
        cells = [row["batch"], f"{row['dropout_p']:g}"]
        for name in ("forward", "backward"):
            theirs, ours = (_seconds(x, "H100")[name] for x in (other, row))
            cells += [between([1e6 * x for x in seconds], 0) for seconds in (theirs, ours)]
            cells.append(between([a / b for a, b in zip(theirs, ours, strict=True)]))
        for x in (other, row):
            used = (*x["forward_registers"], *x["backward_registers"])
            cells.append(", ".join(map(str, used)))
        yield cells


def _loop(row: dict[str, Any]) -> str:
    return f"{row['loop']} x {row['trips']}" if row["trips"] else "none"


def _blocks(rows: Rows, constants: dict[str, Any]) -> Iterable[list[str]]:
    order = ("direction", "length", "dropout_p", "contender")
    architectures = list(dict.fromkeys(row["architecture"] for row in rows))

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return (architectures.index(row["architecture"]), *(row[name] for name in order))

    others = {key(row)[:-1]: row["flop_per_cycle"] for row in rows if row["contender"] == FLASH}
    for row in sorted(rows, key=key):
        gpu = constants[row["architecture"]]
        rate = row["flop_per_cycle"]
        cells = [row["architecture"], row["contender"], row["direction"], str(row["length"])]
        cells += [f"{row['dropout_p']:g}", _loop(row), row["bound"]]
        cells += [str(row["blocks_per_sm"]), f"{row['cycles']:.0f}", f"{rate:.0f}"]
        ends = RANGES.get(row["architecture"])
        clocks = [end.clock for end in ends] if ends else [gpu["clock"]]
        cells.append(between([rate * gpu["sms"] * clock / 1e12 for clock in clocks], 0))
        other = others.get(key(row)[:-1])
        yield [*cells, f"{rate / other:.2f}" if other and row["contender"] in INSTRUCTIONS else "-"]


def _beside(published: float, predicted: float) -> list[str]:
    return [f"{published}", f"{predicted:.0f}", f"{predicted / published - 1:+.0%}"]


def _triton(rows: Rows) -> Iterable[list[str]]:
    for row in rows:
        if "triton_predicted" in row:
            yield [str(row["length"]), *_beside(row["triton"], row["triton_predicted"])]


def _published(rows: Rows) -> Iterable[list[str]]:
    for row in rows:
        cells = [row["direction"], str(row["length"]), *_beside(row["value"], row["predicted"])]
        cells.append(between(row["predicted_range"], 0))
        loop = between(row["loop_range"], 0) if "loop_range" in row else "-"
        yield [*cells, str(row["cudnn"]), str(row["flash_3"]), loop, between(row["ours_range"], 0)]


def render(result: dict[str, Any]) -> str:
    """The page."""
    version = f" {result['flash_attention']}" if result["flash_attention"] else ""
    slow, fast = RANGES["H100"]
    head = HEAD.format(
        nvcc=result["nvcc"],
        command=commands(result["command"]),
        clock=f"{slow.clock / 1e9:.2f} to {fast.clock / 1e9:.3f}",
        memory=f"{slow.memory / 1e12:.1f} to {fast.memory / 1e12:.1f}",
        memory_200=" to ".join(f"{end.memory / 1e12:.1f}" for end in RANGES["H200"]),
        gap=f"{1e6 * slow.gap:.2f} to {1e6 * fast.gap:.2f}",
    )
    parts = [head]
    header = ["GPU", "kernels", "batch", "p", "forward, us", "backward, us", "forward, TFLOP/s"]
    header += ["backward", "both", "FlashAttention-2, both", "times as fast"]
    parts += [PASSES.format(version=version), table(header, _passes(result["passes"]), 3) + "\n"]
    if wide := result.get("wide"):
        header = ["batch", "p", "forward, mma.sync, us", "wgmma", "times as fast"]
        header += ["backward, mma.sync, us", "wgmma", "times as fast"]
        header += ["registers, mma.sync", "registers, wgmma"]
        parts += [WIDE, table(header, _wide(wide), 1) + "\n"]
    header = ["GPU", "kernel of", "pass", "tokens", "p", "main loop x trips", "busy"]
    header += ["blocks an SM", "cycles", "FLOP a cycle and SM", "TFLOP/s", "times as fast"]
    parts += [BLOCKS, table(header, _blocks(result["blocks"], result["constants"]), 7) + "\n"]
    if result["flash_attention"]:
        header = ["pass", "tokens", "FlashAttention-2, published", "model", "off by", "range"]
        header += ["cuDNN, published", "FlashAttention-3, published", "in its way, model"]
        header += ["bert_unpad, model"]
        parts += [PUBLISHED, table(header, _published(result["published"])) + "\n"]
    if rows := list(_triton(result["published"])):
        header = ["tokens", "Triton, published", "model", "off by"]
        parts += [TRITON.format(version=triton_forward.VERSION), table(header, rows, 0) + "\n"]
    return "\n".join(parts)


def explain(result: dict[str, Any]) -> str:
    """What keeps each block busy: shares of time by pipe, and its main loop's instructions."""
    lines = []
    for row in result["blocks"]:
        names = ("architecture", "contender", "direction", "length")
        title = ", ".join(str(row[name]) for name in names)
        lines.append(
            f"{title} tokens, p = {row['dropout_p']:g}: {row['cycles']:.0f} cycles a block"
        )
        busy = sorted(row["busy"].items(), key=lambda item: -item[1])
        lines.append("  busy: " + ", ".join(f"{pipe} {share:.0%}" for pipe, share in busy))
        counts = ", ".join(f"{n:g} {name}" for name, n in row["opcodes"].items())
        lines.append(f"  loop {row['loop']}, {row['trips']} times: {counts}")
    return "\n".join(lines)
