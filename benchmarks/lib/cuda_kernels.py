"""What ptxas says about CUDA kernels: registers, shared and local memory, and what follows from it.

The build keeps the compiler's report beside each object (build/native-*/*.cu.o.log).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
# "(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ... in the
# function '...'", "(C7517) warpgroup.wait is injected in around line ... in function '...'"
SERIALIZED = re.compile(r"(?:wgmma|warpgroup)\S* .*(?:serialized|injected).* function '(\S+)'")

# Registers are handed out to a warp in units of 256, from its own of an SM's four partitions.
SM_REGISTERS, SM_PARTITIONS = 65536, 4
WARP_UNIT = 256
# Warps and blocks that an SM has room for (CUDA programming guide, "Compute Capabilities").
SM_WARPS, SM_BLOCKS = 64, 32
OTHER_ROOM = {"sm_75": (32, 16), "sm_86": (48, 16), "sm_89": (48, 24), "sm_120": (48, 24)}


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
    readable: str = ""

    @property
    def uses_local_memory(self) -> bool:
        return bool(self.stack or self.spill_stores or self.spill_loads)

    def blocks_per_sm(self, threads: int) -> int:
        """Blocks that registers and warps allow; shared memory is left out."""
        unit = -(-self.registers * 32 // WARP_UNIT) * WARP_UNIT
        warps = SM_REGISTERS // SM_PARTITIONS // unit * SM_PARTITIONS
        most_warps, most_blocks = OTHER_ROOM.get(self.arch, (SM_WARPS, SM_BLOCKS))
        return min(min(warps, most_warps) // -(-threads // 32), most_blocks)


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
        name = re.sub(r"\(anonymous namespace\)::|bert_unpad::|\bcuda::", "", name)
        pretty.append(re.sub(r"\((?:int|bool|unsigned int)\)", "", name).removeprefix("void "))
    return pretty


def objects(folder: Path) -> list[Path]:
    """The kernels' objects that the last build used; older ones may lie beside them."""
    ninja = folder / "build.ninja"
    if not ninja.is_file():
        return []
    names = re.findall(r"^build (\S+\.cu\.o):", ninja.read_text(), re.MULTILINE)
    return [folder / name for name in names]


def _reports(folders: Iterable[Path]) -> list[str]:
    logs = [Path(f"{file}.log") for folder in folders for file in objects(folder)]
    return [log.read_text() for log in logs if log.is_file()]


def serialized(folders: Iterable[Path]) -> list[str]:
    """Kernels of these builds in which ptxas waits for wgmma where the source does not."""
    return demangle([n for report in _reports(folders) for n in SERIALIZED.findall(report)])


def collect(folders: Iterable[Path]) -> list[Kernel]:
    """All kernels of these builds, by name and architecture."""
    kernels = [kernel for report in _reports(folders) for kernel in parse(report)]
    for kernel, name in zip(kernels, demangle([k.name for k in kernels]), strict=True):
        kernel.readable = name
    return sorted(kernels, key=lambda k: (k.readable, k.arch))


def nvcc_version(folders: Iterable[Path]) -> str:
    """The nvcc that the builds name, such as "13.0, V13.0.88"; "unknown" if it cannot be asked."""
    for folder in folders:
        ninja = folder / "build.ninja"
        found = re.search(r"(\S*nvcc) -MD", ninja.read_text()) if ninja.is_file() else None
        if found and (version := version_of(found[1])):
            return version
    return "unknown"


def version_of(nvcc: str) -> str:
    """What this nvcc says it is; "" if it cannot be asked."""
    tool = shutil.which(nvcc)
    if tool is None:
        return ""
    said = subprocess.run([tool, "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release (.+)", said)
    return release[1].strip() if release else ""
