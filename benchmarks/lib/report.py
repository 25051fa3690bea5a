"""What the sections of docs/benchmarks.md share: reading a result, tables, and where figures are
from."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "cpu"
LINK = "../benchmarks/results"  # from docs/benchmarks.md

Result = dict[str, Any]


TIMES = ("date", "commit")
# What figures depend on beside the code: a machine, or where none was measured a compiler, the
# setup of a simulation, a wheel.
PLACES = ("machine", "nvcc", "setup", "wheel")
# What nvcc makes of each kernel: a check of the build compares it, so it is of no one commit.
RECORDS = ("cuda_kernels.json",)


def git(*arguments: str) -> str | None:
    """What git prints; None outside a repository or without git."""
    if shutil.which("git") is None:
        return None
    out = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return out.stdout.strip() if out.returncode == 0 else None


def commit() -> str | None:
    """The checkout's commit, with a + where tracked files differ from it."""
    found = git("rev-parse", "--short", "HEAD")
    changes = git("status", "--porcelain", "--untracked-files=no", ":!benchmarks/results")
    return f"{found}+" if found and changes else found


def undated(result: Result) -> list[str]:
    """What a result does not say of: its date, its commit, and what its figures depend on.

    A result of before commits were noted has `added_in` instead: the commit that added its figures.
    Where `dated_by` says so, the date is that commit's too.
    A log of steps (gpu_check.json) has a date and a commit in each of them.
    """
    if isinstance(steps := result.get("steps"), dict):
        return [f"{key} of {name}" for name, x in steps.items() for key in TIMES if not x.get(key)]
    dated = {"date": ("date",), "commit": ("commit", "added_in"), "machine": PLACES}
    return [key for key, names in dated.items() if not any(result.get(name) for name in names)]


def undated_files() -> list[str]:
    """The result files that lack a date, a commit or a machine, and what they lack."""
    found = []
    for path in sorted(RESULTS.parent.glob("*/*.json")):
        if path.name not in RECORDS and (missing := undated(json.loads(path.read_text()))):
            found.append(f"{path.parent.name}/{path.name}: {', '.join(missing)}")
    return found


def folder(device: str) -> Path:
    """Where a device's results lie."""
    return RESULTS if device == "cpu" else RESULTS.parent / device


def read(name: str, device: str = "cpu") -> Result | None:
    """A device's result of that name; None where that benchmark has written none."""
    path = folder(device) / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def gpus() -> list[str]:
    """The folders of results that are from GPUs."""
    return sorted(path.parent.name for path in RESULTS.parent.glob("*/calibrate.json"))


def names(pattern: str) -> list[str]:
    """The results whose names match, e.g. `simulate_*`."""
    return sorted(path.stem for path in RESULTS.glob(f"{pattern}.json"))


def runs(name: str) -> dict[str, Result]:
    """The result `name`, then those called `name_...`, which other machines or settings gave."""
    return {each: read(each) for each in (*names(name), *names(f"{name}_*"))}


def table(header: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = 1) -> str:
    """A Markdown table; columns after the first `text_columns` are aligned right."""
    lines = [header, ["---"] * text_columns + ["---:"] * (len(header) - text_columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def commands(*lines: str) -> str:
    """A block of commands."""
    return "\n".join(["```bash", *lines, "```"])


def machine_of(result: Result) -> str:
    """The machine and the versions that a result is from."""
    machine = result["machine"]
    place = machine.get("gpu", machine["cpu"])
    parts = [f"{machine['cores']} cores", f"{machine['threads']} threads a process"]
    parts += [machine["isa"], f"PyTorch {machine['pytorch']}", f"Python {machine['python']}"]
    return f"{place}, {', '.join(parts)}".replace(", 1 threads a", ", 1 thread a")


def source(name: str, result: Result, *more_commands: str, device: str = "cpu") -> str:
    """The command that wrote a result, the machine, and the file."""
    lines = [result["command"], *more_commands]
    said = "Measured"
    if "date" in result:
        said += f" on {'or before ' if 'dated_by' in result else ''}{result['date']}"
    if "commit" in result:
        said += f" at commit {result['commit']}"
    if "added_in" in result:
        said += f" (figures added in commit {result['added_in']})"
    said += f" on {machine_of(result)} ([{name}.json]({LINK}/{device}/{name}.json))."
    return f"{commands(*lines)}\n\n{said}"


def figures(pattern: str) -> str:
    """A line of links to the figures whose names match; empty where there is none."""
    found = sorted(path.name for path in RESULTS.glob(f"{pattern}.png"))
    if not found:
        return ""
    return "Figures: " + ", ".join(f"[{name}]({LINK}/cpu/{name})" for name in found) + "."


def section(title: str, *parts: str) -> str:
    """A section of the page; parts that are empty are left out."""
    return "\n\n".join([f"## {title}", *(part.strip() for part in parts if part)])


def between(values: Sequence[float], digits: int = 2) -> str:
    """The least and the greatest value, or one number where they read alike."""
    ends = (f"{end(values):.{digits}f}" for end in (min, max))
    return " to ".join(dict.fromkeys(ends))


def precision(dtype: str) -> str:
    """The short name of a tensor's type."""
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(dtype, dtype)


def count(number: int, noun: str) -> str:
    """For example `1 seed` or `3 seeds`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
