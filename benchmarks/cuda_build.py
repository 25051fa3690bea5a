"""Reads what the compiler made of every CUDA kernel of the last build.

    python -m benchmarks.cuda_build                # registers and spills
    python -m benchmarks.cuda_build --sass         # and instructions
    python -m benchmarks.cuda_build --record       # notes them in benchmarks/results
    python -m benchmarks.cuda_build --check        # compares them with what is noted

A kernel that spills registers, keeps an array in local memory, or lost its tensor cores still gives
right answers, only slowly, so no test of values sees it; nor that ptxas waits for each wgmma at
once. Fails on these, on more registers than benchmarks/lib/cuda_table.py allows, and on attention
kernels for 16-bit dtypes without the instructions that make them fast.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.lib import cuda_kernels, cuda_sass, cuda_table
from bert_unpad._files import write_text


def show(kernels: list[cuda_kernels.Kernel]) -> list[str]:
    """Prints a line a kernel; returns what is wrong."""
    errors = []
    width = max(len(k.readable) for k in kernels)
    print(f"{'kernel':<{width}}  {'arch':<8} regs   smem  stack  spill st/ld")
    for k in kernels:
        limit = cuda_table.over_limit(k)
        print(
            f"{k.readable:<{width}}  {k.arch:<8} {k.registers:>4} {k.shared:>6} {k.stack:>6}"
            f"  {k.spill_stores}/{k.spill_loads}" + ("  <-- local memory" * k.uses_local_memory)
        )
        if limit:
            errors.append(f"{k.readable} {k.arch}: {k.registers} registers, more than {limit}")
    bad = sum(k.uses_local_memory for k in kernels)
    print(f"{len(kernels)} kernels, {bad} with spills or local memory")
    return errors + [f"{bad} kernels with spills or local memory"] * (bad > 0)


def check_instructions(kernels: list[cuda_kernels.Kernel], files: list[Path]) -> list[str]:
    found = cuda_sass.instructions(files)
    errors, checked = [], 0
    for k in kernels:
        if not cuda_sass.uses_tensor_cores(k.readable, k.arch):
            continue
        opcodes = found.get((k.name, k.arch))
        wrong = ["no machine code"] if opcodes is None else cuda_sass.problems(opcodes, k.arch)
        errors += [f"{k.readable} {k.arch}: {', '.join(wrong)}"] if wrong else []
        checked += 1
        if opcodes is not None:
            names = cuda_sass.needed(opcodes, k.arch)
            counts = ", ".join(f"{opcodes[name]} {name}" for name in names)
            print(f"{k.readable} {k.arch}: {opcodes.total()} instructions, {counts}")
    print(f"{checked} kernels for tensor cores, {len(errors)} without what they need")
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    root = Path(__file__).resolve().parent.parent
    parser.add_argument("folders", nargs="*", type=Path, help="default: build/native-*")
    parser.add_argument("--sass", action="store_true", help="look at the machine code")
    parser.add_argument("--record", action="store_true", help="note what the compiler made")
    parser.add_argument("--check", action="store_true", help="compare it with what is noted")
    args = parser.parse_args()
    folders = args.folders or sorted((root / "build").glob("native-*"))
    kernels = cuda_kernels.collect(folders)
    if not kernels:
        sys.exit("no ptxas report was found; build with nvcc first: pip install -e .")
    files = [file for folder in folders for file in cuda_kernels.objects(folder)]
    errors = show(kernels)
    errors += [f"{name}: ptxas waits for wgmma" for name in cuda_kernels.serialized(folders)]
    if not args.folders:
        unused = cuda_table.unused_limits(kernels)
        errors += [f"no kernel has the recorded name {name!r}" for name in unused]
    if args.sass:
        errors += check_instructions(kernels, files)
    if args.record or args.check:
        version = cuda_kernels.nvcc_version(folders)
        record = cuda_table.render(kernels, cuda_sass.threads(files), version)
        if args.record:
            write_text(cuda_table.RECORD, record)
        elif difference := cuda_table.difference(cuda_table.RECORD, record):
            errors.append(difference)
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()
