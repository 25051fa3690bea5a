"""Installs one wheel beside several versions of Python and PyTorch and tries every operator there.

    python scripts/wheel_matrix.py dist/bert_unpad-*.whl --python python3.10 python3.13 \
        --torch 2.11.0 2.13.0

For each pair a new environment gets that PyTorch from the index that pip knows, then the wheel,
which needs no compiler. There `python -m bert_unpad.info --check` compares every operator with
plain PyTorch, and a batch is packed and batches are planned. What happened is printed, a line each,
and written to --output as JSON. Exits with 1 if a pair failed; one whose PyTorch the index has not
is left out.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

EXAMPLE = """
import json, platform
import numpy as np, torch
from bert_unpad import ops
from bert_unpad.batch import VarlenBatch, pad
from bert_unpad.data import BalancedSampler

batch = VarlenBatch.from_lengths([9, 4, 2, 2])
qkv = torch.randn(batch.total, 3, 12, 64, requires_grad=True)
pad(ops.varlen_attention(qkv, batch, dropout_p=0.1), batch).sum().backward()
assert qkv.grad.isfinite().all()
lengths = np.arange(1, 65, dtype=np.uint16)
assert len(list(BalancedSampler(lengths, num_replicas=2, rank=0, batch_size=4))) == 8
print(json.dumps({"python": platform.python_version(), "torch": torch.__version__}))
"""


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def try_pair(wheel: Path, python: str, torch: str, folder: Path) -> dict[str, Any]:
    """What happened, or a reason under `left_out`."""
    row: dict[str, Any] = {"python": python, "torch": torch}
    made = run([python, "-m", "venv", str(folder / "venv")], folder)
    if made.returncode:
        return row | {"left_out": f"{python} makes no environment"}
    inside = str(folder / "venv" / "bin" / "python")
    pip = [inside, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    needs = ["numpy", "safetensors"]
    if run([*pip, f"torch=={torch}", *needs], folder).returncode:
        return row | {"left_out": f"the index has no PyTorch {torch} for it"}
    begin = time.perf_counter()
    installed = run([*pip, "--no-deps", "--no-index", str(wheel)], folder)
    row["install_seconds"] = round(time.perf_counter() - begin, 1)
    check = run([inside, "-m", "bert_unpad.info", "--check"], folder)
    example = run([inside, "-c", EXAMPLE], folder)
    for step, done in (("install", installed), ("check", check), ("example", example)):
        row[step] = done.returncode == 0
        if done.returncode:
            print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
    if example.returncode == 0:
        row |= json.loads(example.stdout.splitlines()[-1])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="interpreters")
    parser.add_argument("--torch", nargs="+", required=True, help="versions")
    parser.add_argument("--output", type=Path, help="JSON file")
    args = parser.parse_args()
    wheel = args.wheel.resolve(strict=True)
    rows = []
    for python in args.python:
        for torch in args.torch:
            with tempfile.TemporaryDirectory() as folder:
                row = try_pair(wheel, python, torch, Path(folder))
            rows.append(row)
            ended = row.get("left_out") or ", ".join(
                f"{step} {'ok' if row[step] else 'FAILED'}"
                for step in ("install", "check", "example")
            )
            print(f"Python {row['python']}, PyTorch {row['torch']}: {ended}", flush=True)
    if args.output:
        commit = run(["git", "rev-parse", "--short", "HEAD"], Path.cwd()).stdout.strip()
        report = {
            "command": f"python scripts/wheel_matrix.py {wheel.name}",
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "commit": commit or None,
            "wheel": wheel.name,
            "bytes": wheel.stat().st_size,
            "results": rows,
        }
        temporary = args.output.with_suffix(".tmp")
        temporary.write_text(json.dumps(report, indent=1) + "\n")
        temporary.replace(args.output)
    if not all(row.get("left_out") or (row["check"] and row["example"]) for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
