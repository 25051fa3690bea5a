"""The folder for the Hugging Face Hub's kernel-builder: its structure, and that its parts work."""

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.paths import ROOT

tomllib = pytest.importorskip("tomllib")
pytest.importorskip("setuptools")

# The fields of edition 5, `kernels-data/src/config/v5.rs` in github.com/huggingface/kernels.
GENERAL = {"name", "version", "edition", "license", "backends", "hub"}
FIELDS = {
    "cpu": {"backend", "depends", "src", "cxx-flags"},
    "cuda": {"backend", "depends", "src", "cxx-flags", "cuda-flags", "cuda-capabilities"},
}
ALLOWED = {"numpy", "torch"}  # imports, beside the standard library
# What kernel-builder writes: here for a build whose namespace is ours.
OPS = """
from pathlib import Path

import torch

torch.ops.load_library(Path(__file__).parent / "bert_unpad.abi3.so")
ops = torch.ops.bert_unpad


def add_op_namespace_prefix(name):
    return f"bert_unpad::{name}"
"""
USE = """
import sys

import torch
from words import flash_attn_varlen_func, ops
from words.batch import VarlenBatch

torch.manual_seed(0)
batch = VarlenBatch.from_lengths([5, 2, 9])
q, k, v = (torch.randn(batch.total, 2, 16, requires_grad=True) for _ in range(3))
bounds = batch.cu_seqlens
out = flash_attn_varlen_func(q, k, v, bounds, bounds, 9, 9)
gradients = torch.autograd.grad(out.square().sum(), (q, k, v))
parts = zip(*(x.split([5, 2, 9]) for x in (q, k, v)))
attend = torch.nn.functional.scaled_dot_product_attention
whole = [attend(*(x.transpose(0, 1) for x in part)).transpose(0, 1) for part in parts]
expected = torch.autograd.grad(torch.cat(whole).square().sum(), (q, k, v))
torch.testing.assert_close(out, torch.cat(whole))
torch.testing.assert_close(gradients, expected)
weight = torch.ones(16)
torch.testing.assert_close(ops.layer_norm(q, weight), torch.layer_norm(q, [16], weight))
assert not [name for name in sys.modules if name.partition(".")[0] == "bert_unpad"]
"""


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("hub_kernel", ROOT / "scripts" / "hub_kernel.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(script, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "kernel"
    script.main([str(folder), "--repo", "me/bert-unpad"])
    return folder


@pytest.fixture(scope="module")
def build(folder) -> dict:
    return tomllib.loads((folder / "build.toml").read_text())


def test_the_file_has_the_fields_of_its_edition(build):
    assert set(build) == {"general", "torch", "kernel"}
    general = build["general"]
    assert set(general) == GENERAL
    assert (general["edition"], general["backends"]) == (5, ["cpu", "cuda"])
    assert re.fullmatch("[a-z][-a-z0-9]*[a-z0-9]", general["name"])
    assert general["hub"] == {"repo-id": "me/bert-unpad"}
    assert set(build["torch"]) == {"src", "stable-abi"}
    assert build["torch"]["stable-abi"] == "2.11"
    for kernel in build["kernel"].values():
        assert set(kernel) <= FIELDS[kernel["backend"]]
        assert kernel["depends"] == ["torch"]


def test_every_source_of_the_operators_is_compiled_once(script, build, folder):
    """CMake keeps options by file: a file in two sections would get those of both."""
    kernels = list(build["kernel"].values())
    compiled = {
        backend: [
            name for kernel in kernels if kernel["backend"] == backend for name in kernel["src"]
        ]
        for backend in FIELDS
    }
    for names in compiled.values():
        assert len(names) == len(set(names))
    listed = {*build["torch"]["src"], *compiled["cpu"], *compiled["cuda"]}
    files = (path for path in folder.rglob("*") if path.suffix in (".h", ".cpp", ".cu"))
    assert listed == {str(path.relative_to(folder)) for path in files}
    assert set(compiled["cpu"]) < set(compiled["cuda"])

    native = script.native
    device = {f"csrc/{path.relative_to(native.CSRC)}" for path in native.sources("*/*.cu")}
    assert {name for name in listed if name.endswith(".cu")} == device
    by_isa = {
        f"csrc/isa/{isa}/{path.parent.name}_{path.name}"
        for kind, sets in native.X86.items()
        for isa in sets
        for path in native.sources(f"*/*_{kind}.cpp")
    }
    assert {name for name in listed if name.startswith("csrc/isa/")} == by_isa


def test_operators_are_in_the_namespace_of_the_build(folder):
    texts = {path: path.read_text() for path in (folder / "csrc").rglob("*.*")}
    assert not [path for path, text in texts.items() if "LIBRARY(bert_unpad" in text]
    assert not [path for path, text in texts.items() if "LIBRARY_IMPL(bert_unpad" in text]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_namespace_is_expanded(folder):
    source = folder / "csrc" / "schemas.cpp"
    include = Path(torch.__file__).parent / "include"
    command = ["g++", "-std=c++20", "-E", "-P", f"-I{folder / 'csrc'}", "-isystem", str(include)]
    command += ["-DTORCH_EXTENSION_NAME=_words_cpu_1", "-DTORCH_TARGET_VERSION=0x020b000000000000"]
    text = subprocess.run([*command, str(source)], capture_output=True, text=True, check=True)
    assert '"_words_cpu_1"' in text.stdout


def test_the_python_modules_import_only_what_they_may(folder):
    files = list((folder / "torch-ext" / "bert_unpad").rglob("*.py"))
    assert len(files) > 20
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                tops = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                tops = {str(node.module).partition(".")[0]}
            else:
                continue
            assert tops <= {*sys.stdlib_module_names, *ALLOWED}, path


def test_the_package_works_under_another_name(folder, tmp_path):
    """With the compiled module of this checkout, in a process that does not import bert_unpad."""
    package = shutil.copytree(folder / "torch-ext" / "bert_unpad", tmp_path / "words")
    (package / "_ops.py").write_text(OPS)
    (package / "bert_unpad.abi3.so").symlink_to(next((ROOT / "bert_unpad").glob("_C.*so")))
    (tmp_path / "use.py").write_text(USE)
    done = subprocess.run(
        [sys.executable, "use.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_full_folder_is_refused(script, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="output: expected a new or empty folder"):
        script.write_kernel(tmp_path, "me/bert-unpad")
