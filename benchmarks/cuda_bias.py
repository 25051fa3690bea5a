"""Predicts attention's backward pass with a position bias, by the model of an SM (gpu_model/sm).

    RESULT=benchmarks/results/model/position_bias.json PAGE=docs/development/position-bias.md
    python -m benchmarks.cuda_bias --json $RESULT --table $PAGE
    python -m benchmarks.cuda_bias --before OLD/_C_cuda.abi3.so --json $RESULT --table $PAGE
    python -m benchmarks.cuda_bias --from $RESULT --table $PAGE # only writes the page again

--before: the kernels of another build, which stand beside this one's; without it those of the
record stay. Nothing here is measured.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import cuda_model
from benchmarks.lib import cuda_model_cases as cases
from benchmarks.lib import cuda_sass
from benchmarks.lib.report import commit, commands, table
from bert_unpad import ops
from gpu_model.sm import attention, attention_wgmma, kernel, sass
from gpu_model.sm.architectures import ARCHITECTURES
from gpu_model.sm.attention import Bias

CASES = {"24 x 512": [512] * 24, "96 x 128": [128] * 96}
NONE, T5, DEBERTA = "none", "T5's table, 32 buckets", "DeBERTa's terms, 512 buckets"
HEAD = """\
# A position bias's cost by a model

**Modelled, not measured.** Attention's backward pass with a [position bias](../architecture.md) \
by the [model of an SM](../../gpu_model/README.md#the-model-of-an-sm): bf16, 16 heads of dimension \
64, no dropout, with the gradients of the bias. Ranges and constants are those of [attention's \
page](cuda-model.md). Of the launches before and after the kernels only the time between kernels \
and the bytes are counted. nvcc {nvcc}. Written by

{command}

With a bias the pass is two kernels, which compute 7 products; without one it is one kernel with 5 \
where the batch has enough heads. So the same two kernels without a bias stand beside it. "Before": \
sums of each row in global memory, one lane a row, and two loads for each score.

"""
TAIL = """
A table by distance whose queries are consecutive, with up to 272 distances and 64 buckets, takes \
the kernels' short way (`csrc/attention/table_bias.h`); all else the one before. The model gives \
every load from global memory {latency:.0f} cycles, whether L1 has the line or not, so it makes the \
way before look slower than it may be; a GPU has to show how much.
"""


def bias_of(name: str) -> Bias | None:
    """One of the three biases."""
    if name == T5:
        return Bias(tuple(ops.t5_buckets(32, 128, "cpu").tolist()))
    if name == DEBERTA:
        return Bias(tuple(ops.deberta_buckets(512, 256, "cpu").tolist()), ("query", "key"))
    return None


def names(arch: str) -> list[str]:
    """The mangled names of the backward kernels with a bias."""
    found = attention.bias_kernel_names(64)
    return found + (attention_wgmma.bias_kernel_names() if arch == "sm_90a" else [])


def bias_kernels(library: Path, arch: str) -> dict[str, kernel.Kernel]:
    options = ("-arch", arch, "-fun", ",".join(names(arch)))
    functions = sass.parse(cuda_sass.listing("-sass", library, *options))
    return kernel.kernels(functions, cuda_sass.listing("-res-usage", library, *options))


def predict(library: Path, label: str) -> list[dict[str, Any]]:
    """A row for each GPU, way of multiplying, batch and bias."""
    rows = []
    for name, architecture in ARCHITECTURES.items():
        arch = cuda_model.ARCHS[name][0]
        available = cuda_model.own_kernels(arch) | bias_kernels(library, arch)
        ways = {"mma.sync": attention} | ({"wgmma": attention_wgmma} if name == "H100" else {})
        few_heads = replace(architecture, sms=10**6)  # so that there are two kernels
        for batch_name, lengths in CASES.items():
            for bias_name in (NONE, T5, DEBERTA):
                model = cases.Model(architecture)  # which keeps times by kernel and kind of block
                batch = replace(cases.batch_of(lengths), bias=bias_of(bias_name))
                for way, module in ways.items():
                    for kernels in (1, 2) if bias_name == NONE else (2,):
                        device = architecture if kernels == 1 else few_heads
                        stages = module.backward(available, batch, 0.0, device)
                        rows.append(
                            {
                                **{"label": label, "gpu": name, "way": way, "batch": batch_name},
                                **{"bias": bias_name, "kernels": kernels},
                                "seconds": cases.seconds(model, stages)[0],
                                "ranges": cases.ranges(model, stages),
                                "registers": [
                                    launch.kernel.registers
                                    for stage in stages
                                    for launch in stage.launches
                                ],
                            }
                        )
    return rows


def render(record: dict[str, Any]) -> str:
    rows, cells = record["rows"], []

    def times(gpu: str, way: str, batch: str, **wanted: Any) -> tuple[float, float] | None:
        key = {"gpu": gpu, "way": way, "batch": batch} | wanted
        for row in rows:
            if all(row[name] == value for name, value in key.items()):
                low, high = row["ranges"].get("H100", (row["seconds"],) * 2)
                return min(low, high), max(low, high)
        return None

    def span(ends: tuple[float, float] | None) -> str:
        if ends is None:
            return "-"
        texts = [f"{1e6 * x:.0f}" for x in ends]
        return texts[0] if texts[0] == texts[1] else " to ".join(texts)

    seen = dict.fromkeys((r["gpu"], r["way"], r["batch"]) for r in rows)
    for place in seen:
        one, two = (times(*place, bias=NONE, kernels=n, label="now") for n in (1, 2))
        for bias in (T5, DEBERTA):
            before, now = (times(*place, bias=bias, label=label) for label in ("before", "now"))
            ratios = [f"{now[0] / x[0]:.2f}" for x in (two, one)]
            cells.append([*place, bias, *map(span, (one, two, before, now)), *ratios])
    head = [
        *("GPU", "kernels", "batch", "bias", "no bias, us", "no bias, two kernels, us"),
        *("before, us", "now, us", "of two kernels", "of no bias"),
    ]
    text = HEAD.format(nvcc=record["nvcc"], command=commands([record["command"]]))
    latency = ARCHITECTURES["H100"].global_latency
    return text + table(head, cells) + TAIL.format(latency=latency)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--before", type=Path, metavar="FILE", help="another build's _C_cuda*.so")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="the record; keeps its other half"
    )
    parser.add_argument("--table", type=Path, metavar="FILE", help="write a Markdown page")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="of --json")
    args = parser.parse_args()
    if args.source:
        record = json.loads(args.source.read_text())
    else:
        old = json.loads(args.json.read_text())["rows"] if args.json and args.json.exists() else []
        kept = [row for row in old if row["label"] == "before"]
        before = predict(args.before, "before") if args.before else kept
        record = {
            "date": time.strftime("%Y-%m-%d"),
            "commit": commit(),
            "command": shlex.join(["python", "-m", "benchmarks.cuda_bias", *sys.argv[1:]]),
            "what": "modelled from machine code, not measured",
            "nvcc": cuda_model.nvcc_version(),
            "rows": before + predict(cuda_model.library(), "now"),
        }
    page = render(record)
    print(page)
    if args.json:
        cuda_model.write(args.json, json.dumps(record, indent=1) + "\n")
    if args.table:
        cuda_model.write(args.table, page)


if __name__ == "__main__":
    main()
