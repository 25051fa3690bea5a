"""A training step of BERT-large on an H100, added up from models.

    python -m benchmarks.cuda_step                                       # prints the sum
    python -m benchmarks.cuda_step --table docs/development/cuda-step.md # writes the page
    python -m benchmarks.cuda_step --encoders docs/development/encoder-steps.md

Attention's times are those of benchmarks/results/model/attention.json (benchmarks/cuda_model.py).
The other kernels are limited by memory: their time is that of the bytes that they have to read and
write, at the rate that the model of an SM takes for this GPU, and its time between kernels. Matrix
products take what their operations do at an assumed rate. Where a GPU has measured these constants
(benchmarks/calibrate.py), they stand beside the model's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.lib import encoder_steps
from benchmarks.lib.cuda_model_cases import WGMMA, wikipedia_mix
from benchmarks.lib.gpu_rates import RANGES, Rates
from benchmarks.lib.report import commands, table
from benchmarks.lib.step_parts import MODEL, PRODUCT_RATE, PRODUCTS, Part, memory, sum_at
from benchmarks.lib.step_products import (
    HIDDEN,
    INNER,
    LAYERS,
    POSITIONS,
    SEQUENCES,
    VOCAB,
    Layer,
    layers,
)
from bert_unpad.nn.flops import MASKED_FRACTION
from gpu_model.sm.architectures import H100

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
ATTENTION = RESULTS / "model" / "attention.json"
BATCH = f"{SEQUENCES} of Wikipedia"
MATRIX_WEIGHTS = 4 * HIDDEN**2 + 2 * HIDDEN * INNER  # of a layer
# Rows of partial sums of LayerNorm's backward pass, see docs/development/column-sums.md.
PARTIAL_ROWS = 132 + 11


def parts() -> Iterator[Part]:
    tokens = sum(wikipedia_mix(SEQUENCES))
    masked = round(MASKED_FRACTION * tokens)
    read, whole = masked + SEQUENCES, LAYERS - 1
    rows, norm_sums = tokens * HIDDEN, 2 * 4 * PARTIAL_ROWS * 3 * HIDDEN
    matrices, linear = LAYERS * MATRIX_WEIGHTS, layers(tokens)
    operations = sum(3 * layer.count * layer.flops for layer in linear)
    yield Part(
        PRODUCTS,
        3 * sum(layer.count for layer in linear),
        operations / PRODUCT_RATE,
        f"{operations / 1e12:.1f} TFLOP at {PRODUCT_RATE / 1e12:.0f} TFLOP/s (assumed)",
    )
    for row in json.loads(ATTENTION.read_text())["passes"]:
        if (row["architecture"], row["batch"], row["dropout_p"], row["contender"]) == (
            *("H100", BATCH, 0.1, WGMMA),
        ):
            for name in ("forward", "backward"):
                seconds = row[f"{name}_seconds"]
                why = f"{LAYERS} times {1e6 * seconds:.0f} us with launches (wgmma, by the model)"
                yield Part(f"attention, {name}", 0, LAYERS * seconds, why)
    norms, normed = 2 * LAYERS, 2 * (whole * rows + read * HIDDEN)
    yield memory("LayerNorm, forward", norms, 6 * normed, "reads x, residual; writes y")
    yield memory(
        "LayerNorm, backward",
        norms,
        10 * normed + norms * norm_sums,
        "reads x, residual, dy; writes dx, dresidual",
    )
    inner = (whole * tokens + read) * INNER
    yield memory("GELU, forward", LAYERS, 4 * inner, "reads x; writes y")
    yield memory("GELU, backward", LAYERS, 6 * inner, "reads x, dy; writes dx")
    yield memory(
        "rows of the last layer",
        6,
        (2 + 6) * rows + 8 * read * HIDDEN + 3 * 8 * HIDDEN**2,
        "gathered; their gradients put in their places and added; weights' gradients joined",
    )
    tables = 4 * (VOCAB + POSITIONS + 2) * HIDDEN
    yield memory("embeddings, forward", 1, 14 * rows, "reads three rows in fp32; writes one")
    yield memory(
        "embeddings, backward",
        10,
        (14 + 4 + 12) * rows + tables,
        "reads the rows again, dy and, for each table, dz; writes dz and the tables' gradients",
    )
    yield memory(
        "masked tokens: loss, GELU, LayerNorm",
        9,
        6 * masked * VOCAB + (4 + 6 + 4 + 8) * masked * HIDDEN,
        "reads logits twice, writes their gradient",
    )
    weights = matrices + (VOCAB + POSITIONS + 2 + HIDDEN) * HIDDEN
    yield memory("gradients' norm", 4, 4 * weights, "reads gradients")
    yield memory(
        "Adam",
        2,
        28 * weights + 2 * matrices,
        "reads weights, gradients, two moments; writes weights (also in bf16) and moments",
    )
    yield memory(
        "gradients of tables and vectors",
        4,
        (4 + 12) * (weights - matrices),
        "set to zero, then read and added to; those of matrices are written by products",
    )


def ranges(counted: list[Part]) -> str:
    rows = []
    for gpu, (low, high) in RANGES.items():
        slow, fast = sum_at(low, counted), sum_at(high, counted)
        rows.append(
            [
                *(gpu, f"{low.products / 1e12:.0f} to {high.products / 1e12:.0f}"),
                f"{low.memory / 1e12:.1f} to {high.memory / 1e12:.1f}",
                f"{1e6 * low.gap:.2f} to {1e6 * high.gap:.2f}",
                f"{low.clock / 1e9:.2f} to {high.clock / 1e9:.3f}",
                f"{1e3 * slow:.1f} to {1e3 * fast:.1f}",
                f"**{SEQUENCES / slow:.0f} to {SEQUENCES / fast:.0f}**",
            ]
        )
    columns = ["", "products, TFLOP/s", "memory, TB/s", "between kernels, us"]
    return table([*columns, "clock, GHz", "ms", "sequences/s"], rows)


def overlapped(counted: list[Part]) -> str:
    """What `optimizer.overlap` may hide: the update of the layers' matrices and the zeroing."""
    tokens = sum(wikipedia_mix(SEQUENCES))
    matrices = LAYERS * MATRIX_WEIGHTS
    products = 2 * tokens * matrices / PRODUCT_RATE
    # Each product of a layer reads one operand of all tokens and writes another.
    moved = LAYERS * 2 * tokens * (8 * HIDDEN + 2 * INNER) + 2 * matrices
    update = 30 * matrices
    total = sum(part.whole for part in counted)
    rate = SEQUENCES / (total - update / H100.dram)
    return OVERLAP.format(
        products=1e3 * products,
        moved=moved / 1e9,
        update=update / 1e9,
        idle=1e3 * (products - moved / H100.dram),
        hidden=1e3 * update / H100.dram,
        rate=rate,
    )


def roundings() -> Iterator[Part]:
    """What rounding to 8 bits takes, in several ways."""
    matrices = LAYERS * MATRIX_WEIGHTS
    twice = "reads fp32 twice, writes 8 bits, also transposed"
    yield memory("weights, in every forward pass", 8 * LAYERS, 10 * matrices, twice)
    yield memory("weights, once an update", 4, 10 * matrices, f"{twice}; all at once")
    tokens = sum(wikipedia_mix(SEQUENCES))
    # Inputs of three linear layers of a layer, and gradients of five times as many columns.
    others, norms, inner = 8 * tokens * HIDDEN, 2 * tokens * HIDDEN, tokens * INNER
    for name, launches, moved in (
        ("GELU, forward", 3, (4 + 6) * inner),
        ("GELU, backward", 3, (6 + 6) * inner),
        ("other matrices", 12, 6 * others),
    ):
        why = "rounds what has been written: reads it twice, writes 8 bits, also transposed"
        yield memory(name, launches * LAYERS, LAYERS * moved, why)
    for name, launches, moved in (
        ("GELU, forward", 1, 4 * inner),
        ("GELU, backward", 2, 6 * inner),
        ("other matrices but LayerNorm's results", 4, 4 * (others - norms)),
    ):
        why = "reads once, writes 8 bits, also transposed"
        yield memory(f"{name}, `amax_history`", launches * LAYERS, LAYERS * moved, why)
    yield memory(
        "LayerNorm's results, `amax_history`",
        0,
        LAYERS * 2 * norms,
        "what LayerNorm's kernel writes beside y: 8 bits, also transposed",
    )


def measured_products(report: dict[str, Any], linear: list[Layer], dtype: str) -> float:
    """Seconds of a step's matrix products, those of the encoder in `dtype`, all else in bf16."""
    times = {(x["layer"], x["pass"], x["dtype"]): x["seconds"] for x in report["products"]}
    return sum(
        layer.count * times[layer.name, which, dtype if layer.encoder else "bfloat16"]
        for layer in linear
        for which in layer.epilogues()
    )


def compared(report: dict[str, Any], counted: list[Part]) -> str:
    """What was measured on a GPU beside what the model takes for an H100."""
    linear = layers(sum(wikipedia_mix(SEQUENCES)))
    others = sum(3 * x.count * x.flops for x in linear if not x.encoder)
    eight = sum(3 * x.count * x.flops for x in linear) + others  # of twice the rate
    found = measured_products(report, linear, "bfloat16")
    gaps, clock = report["gaps"], report["sm_clock"]
    products = counted[0].seconds / found * PRODUCT_RATE
    step = sum_at(Rates(products, report["copy"], gaps["graph"], MODEL.clock), counted)
    total = sum_at(MODEL, counted)
    rows = [
        ("matrix products, ms", 1e3 * counted[0].seconds, 1e3 * found),
        (
            "matrix products, encoder in 8 bits, ms",
            1e3 * eight / 2 / PRODUCT_RATE,
            1e3 * measured_products(report, linear, "float8"),
        ),
        ("memory, TB/s (measured: a copy)", H100.dram / 1e12, report["copy"] / 1e12),
        ("between kernels of a graph, us", 1e6 * H100.kernel_seconds, 1e6 * gaps["graph"]),
        ("between kernels launched singly, us", 1e6 * H100.kernel_seconds, 1e6 * gaps["launches"]),
        ("clock under load, GHz", H100.clock / 1e9, None if clock is None else clock / 1e9),
        ("a step of these, sequences/s", SEQUENCES / total, SEQUENCES / step),
    ]
    text = [
        [name, f"{modelled:.4g}", "-" if measured is None else f"{measured:.4g}"]
        for name, modelled, measured in rows
    ]
    one = [
        [
            *(x["layer"], x["pass"], x["dtype"], x["epilogue"]),
            f"{1e6 * x['flops'] / PRODUCT_RATE / (1 + (x['dtype'] == 'float8')):.0f}",
            f"{1e6 * x['seconds']:.0f}",
            f"{x['flops'] / x['seconds'] / 1e12:.0f}",
        ]
        for x in report["products"]
    ]
    return MEASURED.format(
        gpu=report["machine"]["gpu"],
        date=report["date"],
        command=commands(report["command"]),
        constants=table(["", "modelled, H100", "measured"], text),
        products=table(
            [
                *("layer", "product", "dtype", "besides"),
                *("modelled, us", "measured, us", "TFLOP/s"),
            ],
            one,
            4,
        ),
    )


HEAD = """\
# A BERT-large step by models

**Modelled**; what an H100 measured stands \
[below](#beside-what-was-measured-nvidia-h100-80gb-hbm3) and in the \
[benchmarks](../benchmarks.md#on-a-gpu). A training step of BERT-large on an H100 \
with CUDA graphs: {sequences} sequences of Wikipedia lengths ({tokens:,} tokens, {share:.0%} of \
them masked), bf16, dropout 0.1, Adam. The last layer computes the rows that the losses read; its \
attention is counted whole. Attention by the [model of an SM](cuda-model.md), other \
kernels by the bytes that they have to move at {dram:.2f} TB/s, and {gap:.0f} us between two \
kernels (both constants of that model, fitted to published kernels), products by an assumed rate. \
What runs beside something else, communication and the host are left out. Written by

{command}

The model's memory and its time between kernels are slower than what cards have measured since \
(below), its clock is faster. All constants at a slow and at a fast end, assumed:

{ranges}

No published figure has been compared with the model's backward pass of attention.
"""
OVERLAP = """
## With the update beside the next forward pass

`optimizer.overlap` updates the layers' matrices on a stream of their own while the next forward \
pass runs. That pass spends {products:.1f} ms in products of layers, which move {moved:.1f} GB at \
most, so the memory is idle for {idle:.1f} ms of them. The update moves {update:.1f} GB: \
{hidden:.1f} ms. If all of it takes place in that time, a step makes **{rate:.0f} sequences/s**. \
That is an upper bound: products and update also share the multiprocessors, for which there is no \
model here.
"""
FP8 = """
## In 8 bits

With `precision: fp8` products take half the time, and rounding is added, of which this is a part:
"""

MEASURED = """
## Beside what was measured: {gpu}

The constants by themselves, on {date}, with L2 emptied before each product; the last line puts \
them into the sum above, and leaves attention's times as they are. Written by

{command}

{constants}

{products}
"""


def calibrations() -> list[dict[str, Any]]:
    """What GPUs have measured, by the names of their folders."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*/calibrate.json"))]


def render() -> str:
    counted = list(parts())
    total, launches = (sum(x) for x in zip(*((p.whole, p.launches) for p in counted), strict=True))
    rate = f"**{SEQUENCES / total:.0f} sequences/s**"
    rows = [part.row for part in counted]
    rows.append(["**sum**", rate, str(launches), f"**{1e3 * total:.1f}**"])
    head = HEAD.format(
        sequences=SEQUENCES,
        tokens=sum(wikipedia_mix(SEQUENCES)),
        share=MASKED_FRACTION,
        dram=H100.dram / 1e12,
        gap=1e6 * H100.kernel_seconds,
        command=commands("python -m benchmarks.cuda_step --table docs/development/cuda-step.md"),
        ranges=ranges(counted),
    )
    columns = ["part", "what is counted", "launches", "ms"]
    eight_bits = table(columns, [part.row for part in roundings()], 2)
    beside = "".join(compared(report, counted) for report in calibrations())
    return f"{head}\n{table(columns, rows, 2)}\n{overlapped(counted)}{FP8}\n{eight_bits}\n{beside}"


def encoder_records() -> tuple[list[dict[str, Any]], dict[str, dict[int, float]]]:
    """What attention takes in other encoders' steps, and what GPUs measured of such a step."""
    measured = {}
    for path in sorted(RESULTS.glob("*/packed_tokens.json")):
        report = json.loads(path.read_text())
        gpu = next(name for name in RANGES if name in report["machine"]["gpu"])
        rows = [row for row in report["results"] if row["contender"] == "bert_unpad"]
        measured[gpu] = {row["length"]: row["tokens_per_second"] for row in rows}
    return json.loads(ATTENTION.read_text())["encoders"], measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--table", type=Path, metavar="FILE", help="write a Markdown page")
    parser.add_argument("--encoders", type=Path, metavar="FILE", help="of ModernBERT and ESM-2")
    args = parser.parse_args()
    page = render() if args.encoders is None else encoder_steps.render(*encoder_records())
    print(page)
    if file := args.encoders or args.table:
        temporary = file.with_suffix(".tmp")
        temporary.write_text(page)
        temporary.replace(file)


if __name__ == "__main__":
    main()
