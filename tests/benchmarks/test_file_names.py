"""The files that benchmarks write are called by `--name`, which their command lines keep."""

import importlib
import shlex
import sys
from pathlib import Path

import pytest

from benchmarks import ops, versions
from benchmarks.lib import harness


@pytest.fixture
def saved(monkeypatch) -> list[tuple[str, str]]:
    """Name and command line of what a benchmark would write; nothing is measured or written."""
    found = []

    def save(name: str, device: str, command: str, payload: dict) -> Path:
        found.append((name, command))
        return Path(f"{name}.json")

    peak = dict.fromkeys(("float32", "bfloat16"), 1.0)
    monkeypatch.setattr(harness, "save", save)
    monkeypatch.setattr(harness, "fix_allocator", lambda wish: wish)
    monkeypatch.setattr(harness, "matmul_peaks", lambda: peak)
    monkeypatch.setattr(harness, "memory_peak", lambda: 1.0)
    return found


@pytest.mark.parametrize(
    ("given", "name"),
    [("", "ops"), ("--name ops_b", "ops_b"), ("--op gelu --name ops_b", "ops_b_gelu")],
)
def test_operators(given, name, saved, monkeypatch):
    monkeypatch.setattr(ops, "cpu_cases", lambda *args: [])
    monkeypatch.setattr(sys, "argv", ["benchmarks/ops.py", *shlex.split(given)])
    ops.main()
    assert saved == [(name, f"python -m benchmarks.ops {given}".strip())]


@pytest.mark.parametrize(("given", "name"), [("", "versions"), (" --name other", "other")])
def test_versions(given, name, saved, monkeypatch, tmp_path):
    monkeypatch.setattr(versions, "compare", lambda *args: {})
    monkeypatch.setattr(versions, "commit", lambda checkout: "0123abc")
    command = ["benchmarks/versions.py", "--earlier", str(tmp_path), *shlex.split(given)]
    monkeypatch.setattr(sys, "argv", command)
    versions.main()
    assert saved == [(name, f"python -m benchmarks.versions --earlier CHECKOUT --rounds 7{given}")]


def test_models(monkeypatch):
    pytest.importorskip("transformers")
    arguments = importlib.import_module("benchmarks.model").arguments
    assert arguments([]).name == "model"
    assert arguments(["--name", "model_b"]).name == "model_b"
