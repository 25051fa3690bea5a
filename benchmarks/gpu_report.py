"""Adds how one step of scripts/gpu_check.sh ended to benchmarks/results/<device>/gpu_check.json.

Each step carries its own date and commit, since parts may run on different days; what the file
says about other steps stays.
"""

from __future__ import annotations

import argparse
import json
import os
import xml.etree.ElementTree as ET
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.lib.report import git

ROOT = Path(__file__).resolve().parent.parent


def counts(junit: Path) -> dict[str, int]:
    """How many tests there were, and how they ended."""
    suite = ET.parse(junit).getroot().find("testsuite")
    if suite is None:
        raise ValueError(f"{junit} is not a JUnit report")
    names = ("tests", "failures", "errors", "skipped")
    return {name: int(suite.get(name, 0)) for name in names}


def merge(path: Path, name: str, entry: dict[str, Any], info: Any) -> None:
    """Replaces one step of the report, whole or not at all."""
    report = json.loads(path.read_text()) if path.is_file() else {}
    steps = {**report.get("steps", {}), name: entry}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    known = info if info is not None else report.get("info")
    temporary.write_text(json.dumps({"info": known, "steps": steps}, indent=2) + "\n")
    os.replace(temporary, path)


def collect() -> Any:
    """What the package says of itself and the machine; None before it is built."""
    try:
        from bert_unpad import info
    except ImportError:
        return None
    return info.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name")
    parser.add_argument("--device", required=True, help="folder of results")
    parser.add_argument("--logs", required=True, type=Path, help="where <name>.xml may be")
    end = parser.add_mutually_exclusive_group(required=True)
    end.add_argument("--status", type=int, help="exit status")
    end.add_argument("--missing", help="why the step was not run")
    parser.add_argument("--seconds", type=int, default=0)
    args = parser.parse_args()
    changes = git("status", "--porcelain", "--untracked-files=no")
    entry: dict[str, Any] = {
        "ok": None if args.missing else args.status == 0,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": git("rev-parse", "HEAD"),
        "uncommitted_changes": None if changes is None else bool(changes),
    }
    if args.missing:
        entry["not_run"] = args.missing
    else:
        entry |= {"status": args.status, "seconds": args.seconds}
        junit = args.logs / f"{args.name}.xml"
        if junit.is_file():
            entry |= counts(junit)
    path = ROOT / "benchmarks" / "results" / args.device / "gpu_check.json"
    merge(path, args.name, entry, collect())


if __name__ == "__main__":
    main()
