"""Whether a command of scripts/gpu_check.sh has the packages that it needs, without a GPU.

    python -m benchmarks.lib.dry_run python -m benchmarks.ops --device cuda --op norm

Runs the command with `--help`, or pytest with `--collect-only`: that imports what it imports first.
What it would import later, inside of functions, is read from the sources of the benchmarks and
tests that it reaches. Prints a line for each thing that is missing, and exits with 1 if there are.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Others import packages of optional extras inside of functions.
FOLLOWED = ("benchmarks", "gpu_model", "tests")
OPTIONAL = {"flash_attn"}  # a peer that is left out where it is not installed
# A file that pytest does not collect, or only says to have skipped.
_LEFT_OUT = re.compile(r"^(?:SKIPPED \[\d+\]|ERROR) (.+)", re.M)


def imports(source: str) -> Iterator[str]:
    """The modules that a file imports anywhere, also by `pytest.importorskip`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "importorskip":
            yield node.args[0].value


def missing_packages(files: Iterable[Path]) -> dict[str, Path]:
    """Packages that these files, or what they import from FOLLOWED, cannot find; and the first file
    that imports each."""
    waiting = list(files)
    seen, missing = set(waiting), {}
    while waiting:
        path = waiting.pop(0)
        for name in imports(path.read_text()):
            package = name.partition(".")[0]
            if package in FOLLOWED:
                stem = ROOT.joinpath(*name.split("."))
                for found in (stem.with_suffix(".py"), stem / "__init__.py"):
                    if found.is_file() and found not in seen:
                        seen.add(found)
                        waiting.append(found)
            elif package not in OPTIONAL | missing.keys() and find_spec(package) is None:
                missing[package] = path
    return missing


def sources(command: Sequence[str]) -> list[Path]:
    """The files of FOLLOWED that a command begins with."""
    found = [ROOT / x for x in command if x.endswith(".py")]
    if "-m" in command:
        found.append(ROOT.joinpath(*command[command.index("-m") + 1].split(".")).with_suffix(".py"))
    return [x for x in found if x.is_file() and x.relative_to(ROOT).parts[0] in FOLLOWED]


def problems(command: Sequence[str]) -> list[str]:
    """What keeps a command from running, a line each."""
    is_pytest = "pytest" in command
    more = ["--collect-only", "-rs"] if is_pytest else ["--help"]
    done = subprocess.run([*command, *more], capture_output=True, text=True, cwd=ROOT)
    said = f"{done.stdout}\n{done.stderr}"
    found = _LEFT_OUT.findall(said) if is_pytest else []
    if done.returncode and not found:
        lines = said.strip().splitlines() or [f"exit status {done.returncode}"]
        found = [line for line in lines if "error" in line.lower()][-1:] or lines[-1:]
    missing = missing_packages(sources(command))
    found += [f"{path.relative_to(ROOT)} needs {name}" for name, path in missing.items()]
    return found


def main() -> None:
    found = problems(sys.argv[1:])
    for problem in found:
        print(f"  {problem}")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
