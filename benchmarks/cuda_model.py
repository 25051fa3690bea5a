"""Predicts attention's times on GPUs from its machine code, by the model of an SM (gpu_model/sm).

    python -m benchmarks.cuda_model                   # this build's kernels
    python -m benchmarks.cuda_model --explain         # what keeps their blocks busy
    python -m benchmarks.cuda_model --flash-attention H100 # and FlashAttention-2's
    TABLE=docs/development/cuda-model.md
    RESULT=benchmarks/results/model/attention.json
    python -m benchmarks.cuda_model --flash-attention H100 --json $RESULT --table $TABLE
    python -m benchmarks.cuda_model --update $RESULT --table $TABLE # after a change of a kernel
    python -m benchmarks.cuda_model --update $RESULT --flash-attention A100 # adds to the record
    python -m benchmarks.cuda_model --from $RESULT --table $TABLE   # only writes the page again

--flash-attention downloads FlashAttention-2's sdist from the package index and compiles 6 kernels
of it per architecture into build/flash_attention, once (about 5 minutes on two cores); --triton
installs Triton's wheel into build/attention_peers and compiles a kernel with it. Nothing here is
measured.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.lib import cuda_kernels, cuda_model_table, cuda_sass, flash_3_loop, triton_forward
from benchmarks.lib import cuda_model_cases as cases
from benchmarks.lib import flash_attention_build as flash_build
from benchmarks.lib.flash_attention_launches import FlashAttention
from benchmarks.lib.report import commit
from gpu_model.sm import attention, attention_wgmma
from gpu_model.sm.architectures import ARCHITECTURES
from gpu_model.sm.kernel import Kernel

ROOT = Path(__file__).resolve().parent.parent
FLASH, PEERS = ROOT / "build" / "flash_attention", ROOT / "build" / "attention_peers"
ARCHS = {"A100": ("sm_80", "sm_80"), "H100": ("sm_90a", "sm_90")}  # ours, FlashAttention-2's


def library() -> Path:
    """This checkout's compiled CUDA operators."""
    found = sorted((ROOT / "bert_unpad").glob("_C_cuda*.so"))
    if not found:
        sys.exit("no bert_unpad/_C_cuda*.so was found; build with nvcc first: pip install -e .")
    return found[-1]


def nvcc_version() -> str:
    """Of the last build, such as "13.0, V13.0.88"; without one, of the nvcc on PATH."""
    built = cuda_kernels.nvcc_version(sorted((ROOT / "build").glob("native-*")))
    return built if built != "unknown" else cuda_kernels.version_of("nvcc") or "unknown"


def own_kernels(arch: str) -> dict[str, Kernel]:
    names = attention.kernel_names(64)
    if arch == "sm_90a":
        names += attention.kernel_names(128)
        names += attention_wgmma.kernel_names(64) + attention_wgmma.kernel_names(128)
    return cuda_sass.kernels(library(), "-arch", arch, "-fun", ",".join(names))


def predict(
    architectures: list[str], compared: list[str], triton: bool, command: str
) -> dict[str, Any]:
    """`compared`: the architectures for which FlashAttention-2 is predicted too; `triton`: whether
    a kernel that Triton compiles is."""
    if compared:
        flash_build.build(FLASH, [ARCHS[name][1] for name in compared])
    result: dict[str, Any] = {
        "command": command,
        "what": "modelled from machine code, not measured",
        "nvcc": nvcc_version(),
        "flash_attention": flash_build.VERSION if compared else None,
        "constants": cases.constants(),
        **{"blocks": [], "passes": [], "wide": [], "published": [], "encoders": []},
    }
    for name in architectures:
        model = cases.Model(ARCHITECTURES[name])
        ours = own_kernels(ARCHS[name][0])
        flash = FlashAttention(FLASH, ARCHS[name][1]) if name in compared else None
        result["blocks"] += cases.blocks(model, ours, flash)
        result["passes"] += cases.passes(model, ours, flash, cases.batches())
        if name == "H100":
            result["wide"] = cases.passes(model, ours, None, cases.wide_batches())
            result["encoders"] = cases.encoders(model, ours)
            loop = flash_3_loop.compiled(PEERS)
            by_triton = triton_forward.compiled(PEERS) if triton else None
            result["published"] = cases.check_published(model, ours, flash, loop, by_triton)
    return result


def update(
    record: dict[str, Any], compared: list[str], triton: bool, command: str
) -> dict[str, Any]:
    """This build's predictions, with FlashAttention-2's and Triton's of a record, or made now for
    `compared` and with `triton`."""
    if record["constants"] != cases.constants():
        sys.exit("--update: expected a record of today's constants; use --flash-attention instead")
    architectures = list(dict.fromkeys(row["architecture"] for row in record["passes"]))
    result = predict(architectures, compared, triton, command)
    for part in ("blocks", "passes"):
        kept = [row for row in record[part] if row["contender"] == cases.FLASH]
        result[part] += [row for row in kept if row["architecture"] not in compared]
    pairs = zip(record["published"], result["published"], strict=True)
    result["published"] = [old | new for old, new in pairs]
    return result | {"flash_attention": flash_build.VERSION}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--architecture", nargs="+", choices=ARCHS, default=["H100", "A100"])
    parser.add_argument(
        "--flash-attention", nargs="+", choices=ARCHS, default=[], help="compare with its kernels"
    )
    parser.add_argument(
        "--update", type=Path, metavar="FILE", help="a record; keeps its other half"
    )
    parser.add_argument(
        "--triton", action="store_true", help="compare a kernel that it compiles with its figures"
    )
    parser.add_argument("--explain", action="store_true", help="print what keeps blocks busy")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the predictions")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write a Markdown page")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="of --json")
    args = parser.parse_args()
    command = shlex.join(["python", "-m", "benchmarks.cuda_model", *sys.argv[1:]])
    if args.source:
        result = json.loads(args.source.read_text())
    elif args.update:
        record = json.loads(args.update.read_text())
        result = update(record, args.flash_attention, args.triton, command)
        args.json = args.json or args.update
    else:
        result = predict(args.architecture, args.flash_attention, args.triton, command)
    page = cuda_model_table.render(result)
    print(cuda_model_table.explain(result) if args.explain else page)
    if args.json:
        dated = {"date": time.strftime("%Y-%m-%d"), "commit": commit()} | result
        write(args.json, json.dumps(dated, indent=1) + "\n")
    if args.table:
        write(args.table, page)


if __name__ == "__main__":
    main()
