"""Instruction sets: which are built, and what the linker may choose between when it joins them."""

from __future__ import annotations

import importlib
import platform
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from bert_unpad import _C
from tests.support.paths import ROOT

BUILD = ROOT / "build" / f"native-{sysconfig.get_config_var('SOABI')}"
ISAS = ["amx", "avx512_bf16", "avx512", "avx2", "neon_bf16", "generic"]
KINDS = ["simd", "bf16", "amx"]  # of files that are compiled per instruction set


def weak_symbols(path: Path) -> list[str]:
    """Demangled names of which the linker keeps one copy of many."""
    listing = subprocess.run(
        ["nm", "--defined-only", "--demangle", str(path)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    entries = [line.split(maxsplit=2) for line in listing.splitlines()]
    return [name for _, kind, name in entries if kind in "WVu"]


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
@pytest.mark.skipif(not BUILD.exists(), reason="needs the objects of a build in this checkout")
def test_every_shared_symbol_of_an_instruction_set_is_in_its_namespace() -> None:
    objects = [path for kind in KINDS for path in BUILD.glob(f"cxx_*_{kind}.cpp.o")]
    assert objects
    for path in objects:
        isa = next(isa for isa in ISAS if path.name.startswith(f"cxx_{isa}_"))
        for name in weak_symbols(path):
            assert f"bert_unpad::{isa}::" in name, f"{path.name}: {name}"


@pytest.mark.parametrize(("jobs", "expected"), [("", []), ("3", ["-j", "3"]), ("0", None)])
def test_max_jobs_limits_the_build(monkeypatch, tmp_path, jobs: str, expected) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "build_backend"))
    native = importlib.import_module("native")
    called = []
    monkeypatch.setenv("MAX_JOBS", jobs)
    monkeypatch.setattr(native, "_ninja", lambda: "ninja")
    monkeypatch.setattr(
        native.subprocess, "run", lambda x: called.append(x) or subprocess.CompletedProcess(x, 0)
    )
    if expected is None:
        with pytest.raises(SystemExit, match="MAX_JOBS: expected a number of 1 or more, got '0'"):
            native.NinjaFile(tmp_path).run(None, False)
    else:
        native.NinjaFile(tmp_path).run(None, False)
        assert called == [["ninja", "-C", str(tmp_path), *expected]]


@pytest.mark.parametrize(
    ("machine", "names"),
    [
        ("x86_64", ["generic", "avx2", "avx512", "avx512_bf16"]),
        ("aarch64", ["generic", "neon_bf16"]),
        ("arm64", ["generic", "neon_bf16"]),
        ("riscv64", ["generic"]),
    ],
)
def test_a_processor_gets_its_own_options(monkeypatch, machine: str, names: list[str]) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "build_backend"))
    native = importlib.import_module("native")
    here = {isa for sets in native.isas().values() for isa in sets}
    assert here == set(_C.built_isas().split(","))
    monkeypatch.setattr(platform, "machine", lambda: machine)
    kinds = native.isas()
    assert list(kinds["simd"]) == names
    options = {flag for sets in kinds.values() for flags in sets.values() for flag in flags}
    assert ("-mavx2" in options) == (machine == "x86_64")
    assert ("-march=armv8.2-a+bf16" in options) == ("neon_bf16" in names)
