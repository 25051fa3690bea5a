"""Reads what ptxas said about every CUDA kernel of the last build; fails on spills.

    python scripts/check_cuda_build.py

The build keeps the compiler's report beside each object (build/native-*/*.cu.o.log). A kernel that
spills registers, or keeps an array in local memory, still gives right answers, only slowly, so no
test of values sees it. Register counts need no recorded limits: each kernel's launch bounds cap
them, and what a cap is too low for turns into a spill.
"""

import argparse
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")


@dataclass
class Kernel:
    """One kernel on one architecture, as ptxas reports it; sizes in bytes."""

    name: str
    arch: str
    registers: int = 0
    shared: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0

    @property
    def uses_local_memory(self) -> bool:
        return bool(self.stack or self.spill_stores or self.spill_loads)


def parse(report: str) -> list[Kernel]:
    """The kernels of one `ptxas -v` report (functions that are no kernels are skipped)."""
    kernels: list[Kernel] = []
    for block in re.split(r"(?=ptxas info\s+: Compiling entry function)", report)[1:]:
        entry, stack, used = ENTRY.search(block), STACK.search(block), USED.search(block)
        if not (entry and stack and used):
            raise ValueError(f"unexpected ptxas report:\n{block}")
        shared = SHARED.search(block)
        sizes = [int(size) for size in stack.groups()]
        kernels.append(
            Kernel(entry[1], entry[2], int(used[1]), int(shared[1]) if shared else 0, *sizes)
        )
    return kernels


def demangle(names: list[str]) -> list[str]:
    """Readable names without namespaces and arguments; mangled ones where there is no c++filt."""
    tool = shutil.which("cu++filt") or shutil.which("c++filt")
    if tool is None:
        return names
    out = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True, check=True)
    pretty = []
    for name in out.stdout.splitlines():
        name = re.sub(r"\((?:anonymous namespace|[^()]*)\)(?!::)$", "", name)
        name = name.replace("(anonymous namespace)::", "").replace("bert_unpad::", "")
        pretty.append(re.sub(r"\((?:int|bool|unsigned int)\)", "", name).removeprefix("void "))
    return pretty


def reports(folder: Path) -> list[Path]:
    """The reports of the objects that the last build used; older ones may lie beside them."""
    ninja = folder / "build.ninja"
    if not ninja.is_file():
        return []
    objects = re.findall(r"^build (\S+\.cu\.o):", ninja.read_text(), re.MULTILINE)
    return [folder / f"{name}.log" for name in objects]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    root = Path(__file__).resolve().parent.parent
    folders = sorted((root / "build").glob("native-*"))
    parser.add_argument(
        "folders",
        nargs="*",
        type=Path,
        default=folders,
        help="default: build/native-*",
    )
    files = [file for folder in parser.parse_args().folders for file in reports(folder)]
    kernels = [kernel for file in files if file.is_file() for kernel in parse(file.read_text())]
    if not kernels:
        sys.exit("no ptxas report was found; build with nvcc first: pip install -e .")
    names = demangle([kernel.name for kernel in kernels])
    rows = sorted(zip(names, kernels, strict=True), key=lambda row: (row[0], row[1].arch))
    width = max(len(name) for name in names)
    print(f"{'kernel':<{width}}  {'arch':<8} regs   smem  stack  spill st/ld")
    for name, k in rows:
        print(
            f"{name:<{width}}  {k.arch:<8} {k.registers:>4} {k.shared:>6} {k.stack:>6}"
            f"  {k.spill_stores}/{k.spill_loads}" + ("  <-- local memory" * k.uses_local_memory)
        )
    bad = sum(kernel.uses_local_memory for kernel in kernels)
    print(f"{len(kernels)} kernels, {bad} with spills or local memory")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
