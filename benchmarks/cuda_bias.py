"""Predicts attention's backward pass with T5's table of position biases, by the model of an SM.

    RESULT=benchmarks/results/model/position_bias.json
    python -m benchmarks.cuda_bias --json $RESULT
    python -m benchmarks.cuda_bias --before OLD/_C_cuda.abi3.so --json $RESULT # and another build's

Microseconds of the two kernels for bf16 and 16 heads of dimension 64, without dropout; what goes on
before and after them is left out. Nothing here is measured.
"""

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
from benchmarks.lib.report import commit
from bert_unpad import ops
from gpu_model.sm import attention, attention_wgmma
from gpu_model.sm.architectures import ARCHITECTURES


def predict(library: Path) -> dict[str, int]:
    """Of a compiled module's kernels, by GPU, instructions and batch."""
    buckets = tuple(ops.t5_buckets().tolist())
    batches = {n: replace(batch, buckets=buckets) for n, batch in cases.batches().items()}
    found = {}
    for gpu, architecture in ARCHITECTURES.items():
        ways: dict[str, Any] = {"mma.sync": attention}
        if gpu == "H100":
            ways["wgmma"] = attention_wgmma
        names = [name for way in ways.values() for name in way.bias_kernel_names(64)]
        options = ("-arch", cuda_model.ARCHS[gpu][0], "-fun", ",".join(names))
        available = cuda_sass.kernels(library, *options)
        model = cases.Model(architecture)
        for name, batch in batches.items():
            for way, launches in ways.items():
                stages = launches.backward(available, batch, 0.0, architecture)
                seconds = cases.seconds(model, stages)[0]
                found[f"{gpu}, {way}, {name}"] = round(1e6 * seconds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--before", type=Path, metavar="FILE", help="another build's _C_cuda*.so")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record")
    args = parser.parse_args()
    record = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "command": shlex.join(["python", "-m", "benchmarks.cuda_bias", *sys.argv[1:]]),
        "what": "microseconds, modelled from machine code, not measured",
        "nvcc": cuda_model.nvcc_version(),
        "now": predict(cuda_model.library()),
    }
    if args.before:
        record["before"] = predict(args.before)
    text = json.dumps(record, indent=1) + "\n"
    print(text, end="")
    if args.json:
        cuda_model.write(args.json, text)


if __name__ == "__main__":
    main()
