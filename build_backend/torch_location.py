"""Finds the PyTorch to compile against without importing it.

Build isolation hides the installing environment's packages, but only its headers and the names of
its shared libraries are needed, so the folder is looked for by path: where this interpreter itself
looks (pip runs the build with the same one), in $VIRTUAL_ENV, and in the environments of the
processes that started the build (`python -m build` runs it in another venv).
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

MINIMUM = (2, 11)


def torch_version(folder: Path) -> tuple[int, int]:
    match = re.search(r"['\"](\d+)\.(\d+)", (folder / "version.py").read_text())
    if not match:
        raise RuntimeError(f"{folder / 'version.py'} names no version")
    return int(match[1]), int(match[2])


def built_with_cuda(folder: Path) -> bool:
    """Whether this PyTorch is a CUDA build, by its version.py: `cuda = "13.0"` or `cuda = None`."""
    text = (folder / "version.py").read_text()
    return re.search(r"^cuda\b[^=\n]*=\s*['\"]", text, re.MULTILINE) is not None


def _search_path(python: str) -> list[Path]:
    """Where another interpreter looks for packages, if it is of this Python version.

    -E, since build front ends hide the environment's packages by way of environment variables.
    """
    code = "import sys; print(tuple(sys.version_info[:2]), *sys.path, sep='\\n')"
    try:
        out = subprocess.run(
            [python, "-E", "-c", code], capture_output=True, text=True, timeout=30, check=True
        ).stdout.split("\n")
    except (OSError, subprocess.SubprocessError):
        return []
    same_version = out[0] == str(tuple(sys.version_info[:2]))
    return [Path(entry) for entry in out[1:] if entry] if same_version else []


def _ancestor_pythons() -> list[str]:
    """The interpreters of the environments that the processes behind this one work on (Linux only).

    A process that is Python names its own; uv is none, but says so by $VIRTUAL_ENV, $CONDA_PREFIX
    or a .venv in its folder.
    """
    pythons, pid = [], os.getppid()
    for _ in range(6):
        process = Path(f"/proc/{pid}")
        try:
            argv0 = (process / "cmdline").read_bytes().split(b"\0")[0].decode()
            stat = (process / "stat").read_text()
            variables = (process / "environ").read_bytes().decode(errors="replace").split("\0")
            folder = os.readlink(process / "cwd")
        except OSError:
            break
        executable = shutil.which(argv0)
        if executable and Path(executable).name.startswith("python"):
            pythons.append(executable)
        elif executable and Path(executable).name == "uv":
            environment = dict(entry.partition("=")[::2] for entry in variables)
            homes = [environment.get(name) for name in ("VIRTUAL_ENV", "CONDA_PREFIX")]
            homes.append(os.path.join(folder, ".venv"))
            pythons += [os.path.join(home, "bin", "python") for home in homes if home]
        pid = int(stat.rpartition(")")[2].split()[1])
        if pid <= 1:
            break
    return pythons


def _candidates():
    for key in ("purelib", "platlib"):
        yield Path(sysconfig.get_path(key))
    for entry in sys.path:
        yield Path(entry or ".")
    yield from _search_path(sys.executable)
    if "VIRTUAL_ENV" in os.environ:
        yield from _search_path(str(Path(os.environ["VIRTUAL_ENV"]) / "bin" / "python"))
    for python in _ancestor_pythons():
        yield from _search_path(python)


def find_torch() -> Path | None:
    """The folder of an installed PyTorch >= 2.11 (`.../site-packages/torch`), or None."""
    for site in _candidates():
        folder = site / "torch"
        if (folder / "include" / "torch" / "csrc" / "stable" / "library.h").is_file() and (
            torch_version(folder) >= MINIMUM
        ):
            return folder
    return None
