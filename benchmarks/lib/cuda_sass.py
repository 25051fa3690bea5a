"""What is in the machine code of CUDA objects: instruction counts and launch bounds.

cuobjdump and nvdisasm are taken from PATH, the CUDA Toolkit, or the wheels nvidia-cuda-cuobjdump
and nvidia-cuda-nvdisasm.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TypeVar

from gpu_model.sm import kernel, sass
from gpu_model.sm.kernel import Kernel

ARCH = re.compile(r"^arch = (\S+)")
FUNCTION = re.compile(r"^\s*Function : (\S+)")
# /*01a0*/  @!P0 LDGSTS.E.BYPASS.128 [R5], ...
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)")
SECTION = re.compile(r"^\.(?:nv\.info\.)?(\S+)")
VALUE = re.compile(r"^\s*Value:\s*0x([0-9a-f]+) 0x([0-9a-f]+) 0x([0-9a-f]+)")

T = TypeVar("T")
KernelKey = tuple[str, str]  # mangled name, architecture

# Per warp: matrix products on tensor cores, fragments from shared memory by ldmatrix, and copies
# from global to shared memory that pass no register.
NEEDED = ("HMMA", "LDSM", "LDGSTS")
NEEDED_WGMMA = ("HGMMA", "LDGSTS")  # wgmma takes fragments from shared memory itself
NEEDED_SM75 = ("HMMA", "LDSM")  # there are no such copies
FORBIDDEN = ("LDL", "STL")  # local memory


def find_tools() -> dict[str, str]:
    """Environment in which `cuobjdump` runs; it calls nvdisasm by name."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    wheels = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin"), reverse=True)
    for folder in [*os.environ["PATH"].split(os.pathsep), f"{home}/bin", *map(str, wheels)]:
        if all(shutil.which(tool, path=folder) for tool in ("cuobjdump", "nvdisasm")):
            return os.environ | {"PATH": folder + os.pathsep + os.environ["PATH"]}
    raise SystemExit(
        "no folder with cuobjdump and nvdisasm was found on PATH, in the CUDA Toolkit or among "
        "Python's packages: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
    )


def listing(option: str, file: Path, *more: str) -> str:
    """What `cuobjdump` prints, e.g. with -sass or -res-usage."""
    env = find_tools()
    tool = shutil.which("cuobjdump", path=env["PATH"])
    command = [str(tool), option, *more, str(file)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"cuobjdump {option} {file}: {done.stderr.strip()}")
    return done.stdout


def kernels(file: Path, *options: str) -> dict[str, Kernel]:
    """Its kernels for the model of an SM, by mangled name; `options`: of `listing`."""
    functions = sass.parse(listing("-sass", file, *options))
    return kernel.kernels(functions, listing("-res-usage", file, *options))


def count_instructions(lines: list[str]) -> dict[KernelKey, Counter[str]]:
    """Opcodes without their suffixes, from `cuobjdump -sass`."""
    result: dict[KernelKey, Counter[str]] = {}
    arch, current = "", None
    for line in lines:
        if found := ARCH.match(line):
            arch, current = found[1], None
        elif found := FUNCTION.match(line):
            current = result.setdefault((found[1], arch), Counter())
        elif current is not None and (found := INSTRUCTION.match(line)):
            current[found[1]] += 1
    return result


def read_threads(elf: list[str]) -> dict[KernelKey, int]:
    """The most threads of a block, as __launch_bounds__ say, from `cuobjdump -elf`."""
    result: dict[KernelKey, int] = {}
    arch, name, wanted = "", "", False
    for line in elf:
        if found := ARCH.match(line):
            arch = found[1]
        elif found := SECTION.match(line):
            name = found[1]
        elif "EIATTR_MAX_THREADS" in line or "EIATTR_REQNTID" in line:
            wanted = True
        elif wanted and (found := VALUE.match(line)):
            x, y, z = (int(n, 16) for n in found.groups())
            result[name, arch] = x * y * z
            wanted = False
    return result


def _instructions_of(file: Path) -> dict[KernelKey, Counter[str]]:
    return count_instructions(listing("-sass", file).splitlines())


def _threads_of(file: Path) -> dict[KernelKey, int]:
    return read_threads(listing("-elf", file).splitlines())


def _of_all(read: Callable[[Path], dict[KernelKey, T]], files: list[Path]) -> dict[KernelKey, T]:
    """One process a core, the largest files first: listing and reading one takes up to a minute."""
    found: dict[KernelKey, T] = {}
    largest_first = sorted(files, key=lambda file: -file.stat().st_size)
    with ProcessPoolExecutor() as pool:
        for of_file in pool.map(read, largest_first):
            found |= of_file
    return found


def instructions(files: list[Path]) -> dict[KernelKey, Counter[str]]:
    """Of all kernels in these objects."""
    return _of_all(_instructions_of, files)


def threads(files: list[Path]) -> dict[KernelKey, int]:
    """Of all kernels in these objects."""
    return _of_all(_threads_of, files)


def uses_tensor_cores(readable: str, arch: str = "sm_80") -> bool:
    """Must this kernel? Attention does in 16-bit dtypes; sm_75 multiplies no bf16."""
    dtypes = "f16" if arch == "sm_75" else "bf16|f16"
    return re.match(rf"attention_\w+<({dtypes}),", readable) is not None


def needed(opcodes: Counter[str], arch: str = "sm_80") -> tuple[str, ...]:
    """The instructions of a kernel with wgmma, or of one without."""
    if arch == "sm_75":
        return NEEDED_SM75
    return NEEDED_WGMMA if opcodes["HGMMA"] else NEEDED


def problems(opcodes: Counter[str], arch: str = "sm_80") -> list[str]:
    """What is wrong with a kernel that should run on tensor cores."""
    found = [f"no {opcode}" for opcode in needed(opcodes, arch) if not opcodes[opcode]]
    return found + [f"{opcodes[opcode]} {opcode}" for opcode in FORBIDDEN if opcodes[opcode]]
