"""The page docs/development/cuda-model.md, from what benchmarks/cuda_model.py predicts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.lib.cuda_model_cases import FLASH, OURS, WGMMA
from benchmarks.lib.report import commands, table

Rows = list[dict[str, Any]]
INSTRUCTIONS = {OURS: "mma.sync", WGMMA: "wgmma"}  # that a contender multiplies by

HEAD = """\
# Attention's speed by a model

**Modelled, not measured.** An H100 has since [measured](../benchmarks.md#on-a-gpu) 0.67 to \
0.71 of the rates of both passes that stand here for wgmma, and 0.84 to 0.96 of those for \
FlashAttention-2. The [model of an SM](../../gpu_model/README.md#the-model-of-an-sm) goes \
through the machine code that nvcc made; what it can and cannot show is said there. All figures \
are for bf16 and head dimension 64. \
nvcc {nvcc}. Written by

{command}
"""
PASSES = """\
## Whole passes

16 heads, with dropout probability p. An H100 runs the kernels with wgmma, an A100 those with \
mma.sync, which are also shown as they would run on an H100. "Of Wikipedia": lengths at even \
quantiles of its histogram; "mixed": a fifth of 512 tokens, the others evenly from 20 to 360. \
Times include memory traffic and launches. The last columns compare with \
FlashAttention-2{version} as its own build makes it, forward + backward.
"""
BLOCKS = """\
## Blocks

One block of full tiles with as many others on the SM as fit. Cycles are its share of the SM's \
time; `busy` is the pipe that is busy most, and how much of the time. TFLOP/s: of a GPU that is \
full of them, without memory traffic. The last column compares with FlashAttention-2's kernel.
"""
PUBLISHED = """\
## Published figures

FlashAttention-2 on an H100, without dropout, sequences of one length, 32 heads, 16,384 tokens: \
figures 5 and 6 of Shah et al., "FlashAttention-3" (arXiv:2407.08608), and the same kernels in the \
model. Four of its constants were fitted with these figures in view, so they are no independent \
check.
"""


def _milliseconds(row: dict[str, Any]) -> float:
    return 1e3 * (row["forward_seconds"] + row["backward_seconds"])


def _rate(row: dict[str, Any], products: int, *names: str) -> str:
    seconds = sum(row[f"{name}_seconds"] for name in names)
    return f"{products * row['products'] / seconds / 1e12:.0f}"


def _passes(rows: Rows) -> Iterable[list[str]]:
    others = {
        (r["architecture"], r["batch"], r["dropout_p"]): r for r in rows if r["contender"] == FLASH
    }
    for row in (r for r in rows if r["contender"] in INSTRUCTIONS):
        cells = [row["architecture"], INSTRUCTIONS[row["contender"]], row["batch"]]
        cells.append(f"{row['dropout_p']:g}")
        cells += [f"{1e6 * row[f'{name}_seconds']:.0f}" for name in ("forward", "backward")]
        cells += [_rate(row, 2, "forward"), _rate(row, 5, "backward")]
        cells.append(_rate(row, 7, "forward", "backward"))
        other = others.get((row["architecture"], row["batch"], row["dropout_p"]))
        if other is None:
            yield [*cells, "-", "-"]
        else:
            ratio = _milliseconds(other) / _milliseconds(row)
            yield [*cells, _rate(other, 7, "forward", "backward"), f"{ratio:.2f}"]


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
        cells.append(f"{rate * gpu['sms'] * gpu['clock'] / 1e12:.0f}")
        other = others.get(key(row)[:-1])
        yield [*cells, f"{rate / other:.2f}" if other and row["contender"] in INSTRUCTIONS else "-"]


def _published(rows: Rows) -> Iterable[list[str]]:
    for row in rows:
        off = row["predicted"] / row["value"] - 1
        cells = [row["direction"], str(row["length"]), str(row["value"])]
        yield [*cells, f"{row['predicted']:.0f}", f"{off:+.0%}"]


def render(result: dict[str, Any]) -> str:
    """The page."""
    version = f" {result['flash_attention']}" if result["flash_attention"] else ""
    parts = [HEAD.format(nvcc=result["nvcc"], command=commands(result["command"]))]
    header = ["GPU", "kernels", "batch", "p", "forward, us", "backward, us", "forward, TFLOP/s"]
    header += ["backward", "both", "FlashAttention-2, both", "times as fast"]
    parts += [PASSES.format(version=version), table(header, _passes(result["passes"]), 3) + "\n"]
    header = ["GPU", "kernel of", "pass", "tokens", "p", "main loop x trips", "busy"]
    header += ["blocks an SM", "cycles", "FLOP a cycle and SM", "TFLOP/s", "times as fast"]
    parts += [BLOCKS, table(header, _blocks(result["blocks"], result["constants"]), 7) + "\n"]
    if result["published"]:
        header = ["pass", "tokens", "published, TFLOP/s", "model", "off by"]
        parts += [PUBLISHED, table(header, _published(result["published"])) + "\n"]
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
