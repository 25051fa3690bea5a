"""How CUDA is built: which nvcc, which architectures, and the check for spills."""

import importlib.util
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT


def load(path: str):
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def native(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "build_backend"))
    return load("build_backend/native.py")


@pytest.fixture
def nvcc(tmp_path, monkeypatch):
    """A stand-in for nvcc, the only one that can be found."""
    tool = tmp_path / "bin" / "nvcc"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    for name in ("CUDA_HOME", "CUDA_PATH", "BERT_UNPAD_CUDA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tool.parent))
    return tool


def test_architectures_of_a_list(native):
    flags = [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_80,code=compute_80",
        "-gencode=arch=compute_90a,code=sm_90a",
    ]
    assert native.cuda_arch_flags("8.0+PTX;9.0a") == flags
    assert native.cuda_arch_flags(" 8.0+PTX, 9.0a") == flags
    with pytest.raises(SystemExit, match="'Hopper'"):
        native.cuda_arch_flags("8.0;Hopper")


def test_cuda_is_built_where_nvcc_is(native, nvcc, monkeypatch):
    assert native.find_nvcc() == str(nvcc)
    assert "bert_unpad._C_cuda" in [extension.name for extension in native.extensions()]
    monkeypatch.setenv("BERT_UNPAD_CUDA", "0")
    assert native.find_nvcc() is None
    assert "bert_unpad._C_cuda" not in [extension.name for extension in native.extensions()]
    monkeypatch.setenv("BERT_UNPAD_CUDA", "yes")
    with pytest.raises(SystemExit, match="must be 0 or 1"):
        native.find_nvcc()


def test_cuda_home_wins_over_path(native, nvcc, tmp_path, monkeypatch):
    other = tmp_path / "other" / "bin" / "nvcc"
    other.parent.mkdir(parents=True)
    other.write_text("")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "other"))
    assert native.find_nvcc() == str(other)


def test_missing_nvcc_is_an_error_where_cuda_is_demanded(native, nvcc, monkeypatch):
    monkeypatch.setenv("BERT_UNPAD_CUDA", "1")
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="no nvcc was found"):
        native.find_nvcc()


REPORT = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z5cleanv' for 'sm_80'
ptxas info    : Function properties for _Z5cleanv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 4096 bytes smem, 400 bytes cmem[0]
ptxas info    : Compiling entry function '_Z5dirtyv' for 'sm_90a'
ptxas info    : Function properties for _Z5dirtyv
    48 bytes stack frame, 22 bytes spill stores, 88 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 48 bytes cumulative stack size
"""


@pytest.fixture
def checker(monkeypatch):
    module = load("benchmarks/cuda_build.py")

    def run(folder: Path) -> int:
        monkeypatch.setattr(sys, "argv", ["check_cuda_build.py", str(folder)])
        with pytest.raises(SystemExit) as end:
            module.main()
        return end.value.code

    return run


def write_build(folder: Path, report: str) -> None:
    (folder / "build.ninja").write_text("build nvcc_a.cu.o: nvcc a.cu\n  flags = -O3\n")
    (folder / "nvcc_a.cu.o.log").write_text(report)
    (folder / "nvcc_removed.cu.o.log").write_text(REPORT)


def test_spills_fail_the_check(checker, tmp_path, capsys):
    write_build(tmp_path, REPORT)
    assert checker(tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[1:] == ["sm_80", "32", "4096", "0", "0/0"]
    assert lines[2].split()[1:6] == ["sm_90a", "64", "0", "48", "22/88"]


def test_clean_kernels_pass_the_check_and_old_reports_do_not_count(checker, tmp_path, capsys):
    write_build(tmp_path, REPORT[: REPORT.index("ptxas info    : Compiling entry function '_Z5d")])
    assert checker(tmp_path) == 0
    assert "1 kernels, 0 with spills" in capsys.readouterr().out


def test_a_build_without_kernels_is_an_error(checker, tmp_path):
    assert "no ptxas report" in checker(tmp_path)
