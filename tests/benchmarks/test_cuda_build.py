"""How CUDA is built: whether, by which nvcc, which architectures, and the check for spills."""

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest
from setuptools import Distribution

from tests.support.paths import ROOT


def load(path: str):
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def backend(monkeypatch):
    """The modules of the build, by name."""
    monkeypatch.syspath_prepend(str(ROOT / "build_backend"))
    for name in ("torch_location", "cuda_choice", "native"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module


@pytest.fixture
def choice(backend):
    return backend("cuda_choice")


@pytest.fixture
def nvcc(tmp_path, monkeypatch):
    """A stand-in for nvcc, the only one that can be found."""
    tool = tmp_path / "bin" / "nvcc"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    for name in ("CUDA_HOME", "CUDA_PATH", "BERT_UNPAD_CUDA", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tool.parent))
    return tool


@pytest.fixture
def torch_with(tmp_path):
    """Makes the folder of a PyTorch with a CUDA version, or None."""

    def make(cuda: str | None) -> Path:
        folder = tmp_path / f"torch-{cuda}"
        folder.mkdir(exist_ok=True)
        (folder / "version.py").write_text(
            "from typing import Optional\n"
            "__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip']\n"
            f"__version__ = '2.13.0'\ncuda: Optional[str] = {cuda!r}\nhip: Optional[str] = None\n"
        )
        return folder

    return make


def test_architectures_of_a_list(choice):
    flags = [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_80,code=compute_80",
        "-gencode=arch=compute_90a,code=sm_90a",
    ]
    assert choice.arch_flags("8.0+PTX;9.0a") == flags
    assert choice.arch_flags(" 8.0+PTX, 9.0a") == flags
    with pytest.raises(SystemExit, match="'Hopper'"):
        choice.arch_flags("8.0;Hopper")


@pytest.fixture
def machine(choice, nvcc, monkeypatch):
    """arch_list where nvcc knows some architectures and nvidia-smi lists some GPUs."""

    def archs(known: str, gpus: str, wish: str = "") -> str:
        nvcc.write_text(f"#!/bin/sh\nprintf 'compute_%s\\n' {known}\n")
        smi = nvcc.with_name("nvidia-smi")
        smi.write_text(f"#!/bin/sh\nprintf '%s\\n' {gpus}\n" if gpus else "#!/bin/sh\nexit 9\n")
        smi.chmod(0o755)
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", wish)
        return choice.arch_list(str(nvcc))

    return archs


KNOWN = "75 80 86 87 88 89 90 100 110 103 120 121"


def test_architectures_are_those_of_the_gpus_here(machine, choice):
    assert machine(KNOWN, "8.6") == "8.6+PTX"
    assert machine(KNOWN, "9.0 7.5 9.0") == "7.5;9.0+PTX"
    assert machine(KNOWN, "12.0 9.0") == "9.0;12.0+PTX"
    assert machine(KNOWN, "7.0 8.0") == "8.0+PTX"
    # No GPU, one that is too old for the operators, one that is too new for nvcc.
    for gpus in ("", "7.0", "13.0"):
        assert machine(KNOWN, gpus) == choice.DEFAULT_ARCHS
    assert machine("75 80 90", "8.0 12.0") == choice.DEFAULT_ARCHS


def test_all_architectures_are_those_that_nvcc_knows(machine):
    assert machine(KNOWN, "8.6", "all") == "7.5;8.0;9.0a;10.0;12.0+PTX"
    assert machine("70 75 80 90", "", "all") == "7.5;8.0;9.0+PTX"
    assert machine(KNOWN, "8.6", "8.0;9.0a") == "8.0;9.0a"


def test_cuda_version_is_read_without_importing_torch(backend, torch_with, tmp_path):
    built_with_cuda = backend("torch_location").built_with_cuda
    assert built_with_cuda(torch_with("13.0"))
    assert not built_with_cuda(torch_with(None))
    (tmp_path / "version.py").write_text("__version__ = '2.13.0'\ncuda = '13.0'\n")
    assert built_with_cuda(tmp_path)


def test_cuda_is_built_where_it_can_be_used(choice, nvcc, torch_with, monkeypatch):
    monkeypatch.setattr(choice, "has_gpu", lambda: True)
    assert choice.choose_nvcc(torch_with("13.0"), False) == (str(nvcc), "")
    path, why = choice.choose_nvcc(torch_with(None), False)
    assert path is None
    assert "PyTorch has no CUDA" in why
    assert "BERT_UNPAD_CUDA=1" in why
    monkeypatch.setattr(choice, "has_gpu", lambda: False)
    path, why = choice.choose_nvcc(torch_with("13.0"), False)
    assert path is None
    assert "no NVIDIA GPU" in why
    assert "BERT_UNPAD_CUDA=1" in why


@pytest.mark.parametrize(
    ("variable", "value"), [("BERT_UNPAD_CUDA", "1"), ("TORCH_CUDA_ARCH_LIST", "9.0a")]
)
def test_cuda_is_built_anywhere_on_demand(choice, nvcc, torch_with, monkeypatch, variable, value):
    monkeypatch.setattr(choice, "has_gpu", lambda: False)
    monkeypatch.setenv(variable, value)
    assert choice.choose_nvcc(torch_with(None), False) == (str(nvcc), "")


def test_a_module_that_is_there_is_kept_current(choice, nvcc, torch_with, monkeypatch):
    monkeypatch.setattr(choice, "has_gpu", lambda: False)
    assert choice.choose_nvcc(torch_with(None), True) == (str(nvcc), "")
    monkeypatch.setenv("BERT_UNPAD_CUDA", "0")
    assert choice.choose_nvcc(torch_with("13.0"), True) == (None, "BERT_UNPAD_CUDA=0")


def test_a_wrong_wish_is_named(choice, nvcc, torch_with, monkeypatch):
    monkeypatch.setenv("BERT_UNPAD_CUDA", "yes")
    with pytest.raises(SystemExit, match="BERT_UNPAD_CUDA: expected 0 or 1, got 'yes'"):
        choice.choose_nvcc(torch_with("13.0"), False)


def test_cuda_home_wins_over_path(choice, nvcc, tmp_path, monkeypatch):
    other = tmp_path / "other" / "bin" / "nvcc"
    other.parent.mkdir(parents=True)
    other.write_text("")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "other"))
    assert choice.find_nvcc() == str(other)


def test_missing_nvcc_is_an_error_where_cuda_is_demanded(choice, nvcc, torch_with, monkeypatch):
    monkeypatch.setattr(choice.shutil, "which", lambda name: None)
    assert "no nvcc" in choice.choose_nvcc(torch_with("13.0"), True)[1]
    monkeypatch.setenv("BERT_UNPAD_CUDA", "1")
    with pytest.raises(SystemExit, match="no nvcc was found"):
        choice.choose_nvcc(torch_with("13.0"), False)


@pytest.fixture
def build_in_place(backend, nvcc, tmp_path, monkeypatch):
    """Runs `build_ext --inplace` in a tree of empty files, with a stand-in for ninja."""
    native = backend("native")

    def link(ninja, jobs, verbose):
        # With absolute paths a copy of the tree would have to compile everything again.
        sources = [line.split()[3] for line in ninja.lines if line.startswith("build ")]
        assert "../../csrc/norm/norm_simd.cpp" in sources
        included = "".join(ninja.written.values())
        assert '#include "norm/norm_cpu.cpp"' in included
        assert not [line for line in [*ninja.lines, included] if str(native.CSRC) in line]
        ninja.folder.mkdir(parents=True, exist_ok=True)
        for target in ninja.targets:
            (ninja.folder / target).write_text(f"new {target}")

    monkeypatch.setattr(native.NinjaFile, "run", link)
    monkeypatch.setattr(native, "ROOT", tmp_path)
    monkeypatch.setattr(native, "CSRC", tmp_path / "csrc")
    for name in ("schemas.cpp", "norm/norm_cpu.cpp", "norm/norm_simd.cpp", "norm/norm.cu"):
        (tmp_path / "csrc" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "csrc" / name).write_text("")
    monkeypatch.setattr(native, "_compiler", lambda: "g++")
    monkeypatch.setattr(native.cuda_choice, "has_gpu", lambda: False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bert_unpad").mkdir()

    def run(cuda: str) -> dict[str, str]:
        """What the modules hold afterwards."""
        monkeypatch.setenv("BERT_UNPAD_CUDA", cuda)
        command = native.NativeBuild(
            Distribution({"packages": ["bert_unpad"], "ext_modules": native.extensions()})
        )
        command.inplace = True
        command.ensure_finalized()
        command.run()
        assert sorted(map(os.path.basename, command.get_outputs())) == sorted(
            path.name for path in (tmp_path / "bert_unpad").iterdir()
        )
        return {p.name.split(".")[0]: p.read_text() for p in (tmp_path / "bert_unpad").iterdir()}

    return run


CPU_MODULES = {name: f"new {name}.so" for name in ("_C", "_host")}


def test_no_cuda_module_of_an_earlier_build_is_left_beside_a_new_one(
    build_in_place, tmp_path, capsys
):
    stale = tmp_path / "bert_unpad" / "_C_cuda.abi3.so"
    stale.write_text("stale")
    assert build_in_place("") == CPU_MODULES | {"_C_cuda": "new _C_cuda.so"}
    stale.write_text("stale")
    capsys.readouterr()
    assert build_in_place("0") == CPU_MODULES
    said = capsys.readouterr().err
    assert "CPU operators only (BERT_UNPAD_CUDA=0)" in said
    assert f"removed {stale}" in said
    assert build_in_place("1") == CPU_MODULES | {"_C_cuda": "new _C_cuda.so"}


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


@pytest.mark.parametrize(
    "line",
    [
        "(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
        "wgmma pipeline crossing function boundary at a function call in the function '_Z5cleanv'",
        "(C7517) warpgroup.wait is injected in around line 1761 by compiler to allow use of "
        "registers defined by GMMA in function '_Z5cleanv'",
    ],
)
def test_waits_that_the_compiler_adds_fail_the_check(checker, tmp_path, capsys, line):
    clean = REPORT[: REPORT.index("ptxas info    : Compiling entry function '_Z5d")]
    write_build(tmp_path, f"ptxas info    : {line}\n{clean}")
    assert checker(tmp_path) == 1
    assert re.search(r"error: \S*clean\S*: ptxas waits for wgmma", capsys.readouterr().err)


def test_clean_kernels_pass_the_check_and_old_reports_do_not_count(checker, tmp_path, capsys):
    write_build(tmp_path, REPORT[: REPORT.index("ptxas info    : Compiling entry function '_Z5d")])
    assert checker(tmp_path) == 0
    assert "1 kernels, 0 with spills" in capsys.readouterr().out


def test_a_build_without_kernels_is_an_error(checker, tmp_path):
    assert "no ptxas report" in checker(tmp_path)
