"""Whether the CUDA operators are built, with which nvcc, and for which architectures.

They take minutes to compile, so they are left out where nobody could run them: next to a PyTorch
without CUDA, and on a machine without a GPU. BERT_UNPAD_CUDA=1, or a TORCH_CUDA_ARCH_LIST, builds
them there too, for example in an image for other machines.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

from torch_location import built_with_cuda

# Where no GPU says what to build. Later GPUs compile the PTX when they first load it.
DEFAULT_ARCHS = "8.0+PTX;9.0a"
# TORCH_CUDA_ARCH_LIST=all: machine code for one of each generation, which the others of it run too.
ALL_ARCHS = ("7.5", "8.0", "9.0a", "10.0", "12.0")
_LEAST = (7, 5)


def find_nvcc() -> str | None:
    """nvcc from $CUDA_HOME, $CUDA_PATH, PATH or the usual folder."""
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")):
        if home and (Path(home) / "bin" / "nvcc").exists():
            return str(Path(home) / "bin" / "nvcc")
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def _output(*command: str) -> list[str]:
    """The lines that a program prints; none if it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split("\n") if done.returncode == 0 else []


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU, found out as scripts/common.sh does."""
    if Path("/dev/nvidia0").exists():
        return True
    return bool(_output("nvidia-smi", "-L"))


def choose_nvcc(torch: Path | None, already_built: bool) -> tuple[str | None, str]:
    """The nvcc to build the CUDA operators with.

    Args:
        torch: the folder of the PyTorch to build against, if there is one.
        already_built: the module lies beside the sources. It is then kept as new as `_C`, so that
            scripts which want it and scripts which do not can take turns.

    Returns:
        nvcc's path and "", or None and the reason why the CUDA operators are left out.

    Raises:
        SystemExit: BERT_UNPAD_CUDA is neither 0 nor 1, or it is 1 and there is no nvcc.
    """
    wish = os.environ.get("BERT_UNPAD_CUDA", "")
    if wish not in ("", "0", "1"):
        raise SystemExit(f"BERT_UNPAD_CUDA: expected 0 or 1, got {wish!r}")
    if wish == "0":
        return None, "BERT_UNPAD_CUDA=0"
    nvcc = find_nvcc()
    if nvcc is None:
        if wish == "1":
            raise SystemExit("BERT_UNPAD_CUDA=1: no nvcc was found on PATH or in $CUDA_HOME/bin")
        return None, "no nvcc on PATH or in $CUDA_HOME; for CUDA operators install the CUDA Toolkit"
    if wish == "1" or os.environ.get("TORCH_CUDA_ARCH_LIST") or already_built:
        return nvcc, ""
    if torch is not None and not built_with_cuda(torch):
        why = "the installed PyTorch has no CUDA"
    elif not has_gpu():
        why = "this machine has no NVIDIA GPU"
    else:
        return nvcc, ""
    return None, f"{why}; BERT_UNPAD_CUDA=1 builds the CUDA operators too"


def gpu_capabilities() -> list[str]:
    """Compute capabilities of this machine's GPUs, such as `8.6`, the highest last."""
    lines = _output("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    found = {line.strip() for line in lines if re.fullmatch(r"\d+\.\d+", line.strip())}
    return sorted(found, key=_numbers)


def known_archs(nvcc: str) -> set[str]:
    """Compute capabilities that an nvcc has code for, such as `8.6`."""
    names = re.findall(r"compute_(\d+)(\d)$", "\n".join(_output(nvcc, "--list-gpu-arch")), re.M)
    return {f"{major}.{minor}" for major, minor in names}


def compression(nvcc: str) -> list[str]:
    """Flags for small machine code, where all drivers that know this nvcc's CUDA can read it."""
    release = re.search(r"release (\d+)", "\n".join(_output(nvcc, "--version")))
    return ["--compress-mode=size"] if release and int(release[1]) >= 13 else []


def _numbers(capability: str) -> tuple[int, ...]:
    return tuple(int(part) for part in capability.split("."))


def arch_list(nvcc: str) -> str:
    """What is built for: $TORCH_CUDA_ARCH_LIST, in which `all` stands for the ALL_ARCHS that this
    nvcc knows; without it this machine's GPUs, or DEFAULT_ARCHS where there is none that nvcc and
    the operators know. With PTX of the newest, for GPUs that are newer.
    """
    wish = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if wish and wish != "all":
        return wish
    known = known_archs(nvcc)
    if wish:
        archs = [arch for arch in ALL_ARCHS if arch.rstrip("a") in known]
    else:
        archs = [arch for arch in gpu_capabilities() if _numbers(arch) >= _LEAST]
        if not set(archs) <= known:
            archs = []
    if not archs:
        return DEFAULT_ARCHS
    return ";".join([*archs[:-1], f"{archs[-1].rstrip('a')}+PTX"])


def arch_names(archs: str) -> list[str]:
    """The entries of a TORCH_CUDA_ARCH_LIST, which may be separated by `;`, `,` or spaces."""
    return archs.replace(",", " ").replace(";", " ").split()


def arch_flags(archs: str) -> list[str]:
    """-gencode flags for a TORCH_CUDA_ARCH_LIST such as `8.0;9.0a+PTX`."""
    flags = []
    for name in arch_names(archs):
        number = name.removesuffix("+PTX").replace(".", "")
        if not number.rstrip("af").isdigit():
            raise SystemExit(f"TORCH_CUDA_ARCH_LIST: expected e.g. `8.0;9.0a+PTX`, got {name!r}")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if name.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags
