"""Instruction sets: which are built, and what the linker may choose between when it joins them."""

import importlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import zipfile
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
    assert list(kinds["fp32"]) == [name for name in names if not name.endswith("bf16")]
    options = {flag for sets in kinds.values() for flags in sets.values() for flag in flags}
    assert ("-mavx2" in options) == (machine == "x86_64")
    assert ("-march=armv8.2-a+bf16+i8mm" in options) == ("neon_bf16" in names)


@pytest.fixture
def ready_wheel(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "build_backend"))
    return importlib.import_module("ready_wheel")


@pytest.mark.parametrize("cuda", ["", "0", "1"])
@pytest.mark.parametrize("stale", [False, True])
def test_a_wheel_of_these_sources_is_taken(ready_wheel, tmp_path, stale: bool, cuda: str) -> None:
    """$BERT_UNPAD_WHEEL: its modules, byte for byte; one of other sources is an error."""
    names = ["_C", "_host"] if stale else ["_C", "_host", "_C_cuda"]
    wheel = tmp_path / f"bert_unpad-0-cp310-abi3-linux_{platform.machine()}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in names:
            archive.writestr(f"bert_unpad/{name}.abi3.so", f"code of {name}")
        archive.writestr(ready_wheel.RECORD, "0" * 64 if stale else ready_wheel.digest(ROOT))
    lib = tmp_path / "lib"
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(lib)],
        cwd=ROOT,
        env=os.environ | {"BERT_UNPAD_WHEEL": str(wheel), "BERT_UNPAD_CUDA": cuda},
        capture_output=True,
        text=True,
        check=False,
    )
    if stale:
        assert done.returncode != 0
        assert "BERT_UNPAD_WHEEL: expected a wheel of the sources" in done.stderr
        assert not lib.exists()
        return
    assert done.returncode == 0, done.stderr
    written = {path.name: path.read_text() for path in (lib / "bert_unpad").iterdir()}
    expected = {f"{name}.abi3.so": f"code of {name}" for name in names}
    if cuda == "0":
        del expected["_C_cuda.abi3.so"]
    assert written == expected | {"compiled_from.txt": ready_wheel.digest(ROOT)}


def test_the_digest_follows_every_source(ready_wheel, tmp_path) -> None:
    for folder in ("build_backend", "csrc/common"):
        (tmp_path / folder).mkdir(parents=True)
    source = tmp_path / "csrc" / "common" / "checks.h"
    digests = set()
    for text in ("a", "b"):
        source.write_text(text)
        digests.add(ready_wheel.digest(tmp_path))
    source.rename(source.with_name("other.h"))
    digests.add(ready_wheel.digest(tmp_path))
    (tmp_path / "build_backend" / "native.py").touch()
    digests.add(ready_wheel.digest(tmp_path))
    assert len(digests) == 4


def test_the_wheel_has_to_be_for_this_processor(ready_wheel, monkeypatch, tmp_path) -> None:
    wheel = tmp_path / "bert_unpad-0-cp310-abi3-linux_m68k.whl"
    wheel.touch()
    monkeypatch.setenv("BERT_UNPAD_WHEEL", str(wheel))
    with pytest.raises(SystemExit, match="BERT_UNPAD_WHEEL: expected a wheel for"):
        ready_wheel.find_wheel()
