"""Compiles kernel sources for the model of a block, with the C++ compiler that $CXX names.

One library is one .cpp file that includes the .cu files it runs. It is compiled again when a file
that it includes, the compiler or a flag has changed.
"""

import ctypes
import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
MODEL = ROOT / "gpu_model" / "block"
KERNELS = ROOT / "gpu_model" / "kernels"
BUILD = ROOT / "build" / "gpu_model"
FLAGS = [
    *("-O2", "-g1", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden"),
    # Fortified longjmp refuses to change stacks.
    "-U_FORTIFY_SOURCE",
    # Messages name files from the root of the tree.
    f"-ffile-prefix-map={ROOT}/=",
    *(f"-I{folder}" for folder in (CSRC, ROOT, MODEL / "include")),
    # What csrc/cuda/primitives.h includes where nvcc does not compile it.
    '-DBU_GPU_MODEL="gpu_model/block/primitives.h"',
]
# Variables that a kernel forgets to set get a value that shows in the results.
PATTERN = "-ftrivial-auto-var-init=pattern"
X86_64_V3 = {"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}


def compiler() -> list[str] | None:
    """$CXX, which may hold options, or g++; None if it is not there."""
    command = os.environ.get("CXX", "g++").split()
    path = shutil.which(command[0])
    return None if path is None else [path, *command[1:]]


@cache
def _optional_flags(command: tuple[str, ...]) -> list[str]:
    """Those that this processor and this compiler know."""
    flags = []
    info = Path("/proc/cpuinfo")
    if platform.machine() == "x86_64" and info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("flags")]
        if lines and set(lines[0].split()) >= X86_64_V3:
            flags.append("-march=x86-64-v3")
    trial = [*command, PATTERN, "-fsyntax-only", "-x", "c++", os.devnull]
    if subprocess.run(trial, capture_output=True).returncode == 0:
        flags.append(PATTERN)
    return flags


@cache
def _version(command: tuple[str, ...]) -> str:
    return subprocess.run([*command, "--version"], capture_output=True, text=True).stdout


def _digest(command: Sequence[str], files: Iterable[str]) -> str:
    """Of how and from what a file is made; "" if one of these is gone."""
    digest = hashlib.sha256("\0".join(command).encode())
    for name in sorted(files):
        path = ROOT / name
        if not path.is_file():
            return ""
        digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _included(depfile: Path) -> list[str]:
    """The files of this tree in a make rule written by the compiler."""
    names = depfile.read_text().replace("\\\n", " ").partition(": ")[2].split()
    paths = [Path(name).resolve() for name in names]
    return [str(path.relative_to(ROOT)) for path in paths if path.is_relative_to(ROOT)]


def compiled(command: Sequence[str], version: str, source: Path, suffix: str) -> Path:
    """What a compiler makes of one file, in build/gpu_model; made if need be.

    Args:
        command: the compiler and its options, without those for files.
        version: of the compiler.
        source: the file.
        suffix: of what is made, such as ".so".

    Raises:
        RuntimeError: the compiler reports an error.
    """
    command = [*command, str(source)]
    variant = hashlib.sha256(f"{command}{version}".encode()).hexdigest()[:8]
    stem = f"{source.stem}-{variant}"
    BUILD.mkdir(parents=True, exist_ok=True)
    # A second process waits here, and then finds the file.
    with (BUILD / f"{stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # What the last build included, and the digest of that.
        record = BUILD / f"{stem}.json"
        made = json.loads(record.read_text()) if record.exists() else {"files": [], "digest": ""}
        result = BUILD / f"{stem}-{made['digest']}{suffix}"
        if not made["digest"] or _digest(command, made["files"]) != made["digest"]:
            stale, result = result, _compile(command, stem, suffix)
            if stale != result:
                stale.unlink(missing_ok=True)
    return result


def _compile(command: list[str], stem: str, suffix: str) -> Path:
    # Renamed at the end: a process that is killed leaves nothing that looks like a result.
    temporary = BUILD / f"{stem}.{os.getpid()}.tmp"
    depfile = temporary.with_suffix(".d")
    outputs = ["-MD", "-MF", str(depfile), "-o", str(temporary)]
    try:
        done = subprocess.run([*command, *outputs], capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            raise RuntimeError(f"{Path(command[-1]).name} does not compile:\n{done.stderr}")
        files = _included(depfile)
        digest = _digest(command, files)
        result = BUILD / f"{stem}-{digest}{suffix}"
        os.replace(temporary, result)
        temporary.write_text(json.dumps({"files": files, "digest": digest}))
        os.replace(temporary, BUILD / f"{stem}.json")
    finally:
        temporary.unlink(missing_ok=True)
        depfile.unlink(missing_ok=True)
    return result


def load(source: Path, flags: Sequence[str] = (), *, pattern: bool = True) -> ctypes.CDLL:
    """The library of one .cpp file, compiled if need be into build/gpu_model. Its `source` is that
    file's path.

    Args:
        source: includes "gpu_model/block/c_api.h" first, then kernels, and exports functions with
            BU_EXPORT.
        flags: more compiler options.
        pattern: whether variables that are not set get a value that shows.

    Raises:
        RuntimeError: there is no compiler, or it reports an error.
    """
    source = Path(source).resolve()
    cxx = compiler()
    if cxx is None:
        raise RuntimeError(f"no C++ compiler: {os.environ.get('CXX', 'g++')!r} was not found")
    optional = [flag for flag in _optional_flags(tuple(cxx)) if pattern or flag != PATTERN]
    command = [*cxx, *FLAGS, *optional, *flags]
    library = ctypes.CDLL(str(compiled(command, _version(tuple(cxx)), source, ".so")))
    library.source = source
    return library
