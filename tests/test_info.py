"""python -m bert_unpad.info: what it says, and that it says it without the compiled modules too."""

import json
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import torch

import bert_unpad
from bert_unpad import _C, _library, info


def test_report_names_what_is_built_and_loaded():
    found = info.collect()
    assert found["versions"]["bert_unpad"] == bert_unpad.__version__
    assert found["versions"]["torch"] == torch.__version__
    assert found["modules"]["_C"]["loaded"]
    assert found["modules"]["_C"]["files"]
    assert found["modules"]["_C_cuda"]["missing"] == _library.cuda_missing
    assert found["cpu"]["instruction_set"] in found["cpu"]["instruction_sets_built"]
    assert found["cpu"]["threads"] == torch.get_num_threads()
    assert len(found["cuda"]["gpus"]) == torch.cuda.device_count()
    kernels = found["operators"]["varlen_attention"]
    assert kernels["CPU"]
    assert kernels["Autograd"]
    assert json.loads(json.dumps(found)) == found


def test_text_shows_every_operator_and_why_a_module_is_missing():
    found = info.collect()
    text = info.render(found)
    for name in found["operators"]:
        assert f"  {name} " in text
    found["modules"]["_C_cuda"].update(loaded=False, missing="it is Tuesday")
    assert "it is Tuesday" in info.render(found)


@pytest.mark.parametrize(
    ("capability", "archs", "served"),
    [
        ((8, 0), "8.0", True),
        ((8, 6), "8.0", True),
        ((9, 0), "8.0", False),
        ((9, 0), "8.0+PTX", True),
        ((7, 5), "8.0+PTX 9.0a", False),
        ((7, 5), "7.5 8.0", True),
        ((10, 3), "9.0a 10.0", True),
        ((12, 1), "10.0 12.0+PTX", True),
        ((13, 0), "12.0+PTX", True),
        ((9, 0), "9.0a", True),
        ((9, 1), "9.0a", False),
        ((10, 0), "9.0a+PTX", False),
        ((10, 3), "10.0f", True),
        ((12, 0), "10.0f", False),
    ],
)
def test_gpus_that_nothing_was_built_for_are_told(capability, archs, served):
    assert info._runs_on(*capability, archs.split()) is served
    found = info.collect()
    found["cuda"]["gpus"] = [
        {"name": "GPU X", "compute_capability": "1.0", "memory": 2**30, "served": served}
    ]
    assert ("not among the architectures built" in info.render(found)) is not served


@pytest.mark.parametrize(("capability", "told"), [("7.5", True), ("8.0", False), ("12.0", False)])
def test_gpus_without_bf16_are_told(capability, told):
    found = info.collect()
    found["cuda"]["gpus"] = [
        {"name": "GPU X", "compute_capability": capability, "memory": 2**30, "served": True}
    ]
    assert ("not in bf16" in info.render(found)) is told


def test_unknown_instruction_set_is_reported(monkeypatch):
    def cpu_isa():
        raise RuntimeError("BERT_UNPAD_ISA=mmx is unknown")

    monkeypatch.setattr(_C, "cpu_isa", cpu_isa)
    assert "BERT_UNPAD_ISA=mmx" in info.collect()["cpu"]["instruction_set"]


def test_reasons_for_a_module_that_does_not_load(monkeypatch, tmp_path):
    monkeypatch.setattr(bert_unpad, "__path__", [*bert_unpad.__path__, str(tmp_path)])
    (tmp_path / f"_broken{EXTENSION_SUFFIXES[0]}").write_bytes(b"not a library")
    assert "cannot be loaded" in _library._import("_broken")
    assert "not built; install" in _library._import("_absent")
    monkeypatch.setattr(_library, "built_files", lambda module: [])
    monkeypatch.setitem(sys.modules, "bert_unpad._C_cuda", None)  # as if it were not there
    assert "BERT_UNPAD_CUDA=1 builds it" in _library._import("_C_cuda")
    foreign = ["_absent.cpython-399-x86_64-linux-gnu.so"]
    monkeypatch.setattr(_library, "built_files", lambda module: foreign)
    assert f"built for another Python ({foreign[0]})" in _library._import("_absent")


def test_works_without_compiled_modules(tmp_path):
    """A copy of the package without them: info reports, ops raises."""
    shutil.copytree(
        Path(bert_unpad.__file__).parent,
        tmp_path / "bert_unpad",
        ignore=shutil.ignore_patterns("*.so", "__pycache__", "data"),
    )
    code = """
import runpy, sys
# An editable install would find the compiled modules after all.
sys.meta_path[:] = [f for f in sys.meta_path if "__editable__" not in (f.__module__ or "")]
try:
    import bert_unpad.ops
except ImportError as error:
    print(error, file=sys.stderr)
sys.argv = ["info", "ARGUMENT"]
runpy.run_module("bert_unpad.info", run_name="__main__")
"""

    def run(argument: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-W", "always", "-c", code.replace("ARGUMENT", argument)],
            cwd=tmp_path,
            env={"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
        )

    out = run("--json")
    assert out.returncode == 0, out.stderr
    found = json.loads(out.stdout)
    assert not found["modules"]["_C"]["loaded"]
    assert "pip install" in found["modules"]["_C"]["missing"]
    assert found["operators"] == {}
    warning, error = (line for line in out.stderr.splitlines() if "operators are missing" in line)
    assert "Warning: bert_unpad's operators are missing: not built" in warning
    assert error.startswith("bert_unpad's operators are missing: not built")
    out = run("--check")
    assert out.returncode == 1
    assert out.stdout.startswith("check failed: bert_unpad's operators are missing: not built")
