"""Writes the operators as a kernel of the Hugging Face Hub: sources for its `kernel-builder`.

    python scripts/hub_kernel.py OUTPUT --repo ORGANISATION/bert-unpad
    cd OUTPUT && kernel-builder build-and-upload

Then `kernels.get_kernel("ORGANISATION/bert-unpad", version=0)` is `bert_unpad.flash`,
`bert_unpad.ops` and `bert_unpad.batch`, for x86-64 and NVIDIA GPUs. OUTPUT has build.toml (edition
5), the sources with their operators in the namespace that kernel-builder gives each build, and the
Python modules with relative imports. A source that is compiled for several instruction sets is
there once for each, since build.toml gives options by file.

Two of the Hub's rules do not hold: the Python modules need numpy, and Python 3.10.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "build_backend"))

import cuda_choice  # noqa: E402
import native  # noqa: E402

NAME = "bert-unpad"
MODULES = ("bert_unpad.batch", "bert_unpad.flash", "bert_unpad.ops")
HOST_ONLY = ("balancer", "host", "text")  # folders of csrc without operators
CXX = ["-O3", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math"]
CXX += ["-Wno-psabi", "-Wno-maybe-uninitialized"]
CUDA = ["-O3", "-std=c++20", "--expt-relaxed-constexpr"]

FLAKE = """{
  description = "bert_unpad: encoders without padding";
  inputs.kernel-builder.url = "github:huggingface/kernels";
  outputs = { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;
      # build.toml has the options of x86-64's instruction sets.
      torchVersions = map (version: version // {
        systems = builtins.filter (system: system == "x86_64-linux") version.systems;
      });
    };
}
"""
CARD = """---
library_name: kernels
license: apache-2.0
---

# {{ repo_id }}

Operators on packed sequences, forward and backward, for CPUs and NVIDIA GPUs: attention with
flash-attention's functions, norms, feed-forward layers, losses, optimizers.
"""
BINDING = """#include "registration.h"

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
"""
# The namespace is a macro, which has to be expanded before PyTorch's macros see it.
LIBRARY = """#pragma once
#include <torch/csrc/stable/library.h>

#define HUB_LIBRARY_OF(name, m) STABLE_TORCH_LIBRARY(name, m)
#define HUB_LIBRARY(m) HUB_LIBRARY_OF(TORCH_EXTENSION_NAME, m)
#define HUB_LIBRARY_IMPL_OF(name, key, m) STABLE_TORCH_LIBRARY_IMPL(name, key, m)
#define HUB_LIBRARY_IMPL(key, m) HUB_LIBRARY_IMPL_OF(TORCH_EXTENSION_NAME, key, m)
"""
PACKAGE = '''"""bert_unpad's operators on packed sequences."""

from . import batch, flash, ops
from .flash import *  # noqa: F403
from .flash import __all__ as _functions

__all__ = ["batch", "flash", "ops", *_functions]
'''
LOADER = '''"""Python functions of the compiled module, which is one file here."""

from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from ._ops import ops


def load(name: str) -> ModuleType:
    """Returns the module of that name."""
    (path,) = Path(__file__).parent.glob(f"{ops.name}.*so")
    loader = ExtensionFileLoader(name, str(path))
    spec = spec_from_file_location(name, path, loader=loader)
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


_module = load("_C")
cpu_isa = _module.cpu_isa
fast_bf16_dot_products = _module.fast_bf16_dot_products
mkl_leaves_avx512_unused = _module.mkl_leaves_avx512_unused
'''
CUDA_LOADER = '''"""Python functions of the CUDA operators."""

from ._C import load

set_linear_timing = load("_C_cuda").set_linear_timing
'''
LOADED = '''"""What is loaded: all that this build has, by the import of `_ops`."""

import torch

cuda_missing = None if torch.version.cuda else "this PyTorch is built without CUDA"


def require() -> None:
    """The operators are there."""
'''
PYTHON = {
    "__init__.py": PACKAGE,
    "_C.py": LOADER,
    "_C_cuda.py": CUDA_LOADER,
    "_library.py": LOADED,
}


def module_file(module: str) -> Path | None:
    """The file of a module or package of ours; None for a name inside one."""
    path = ROOT / module.replace(".", "/")
    found = (path / "__init__.py", path.with_suffix(".py"))
    return next((file for file in found if file.is_file()), None)


def python_files() -> list[Path]:
    """The modules and all that they import of the package, without those written here."""
    seen: dict[Path, None] = {}
    wanted = list(MODULES)
    while wanted:
        file = module_file(wanted.pop())
        if file is None or file in seen or str(file.relative_to(ROOT / "bert_unpad")) in PYTHON:
            continue
        seen[file] = None
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bert_unpad"):
                wanted += [f"{node.module}.{alias.name}" for alias in node.names]
                wanted.append(str(node.module))
    return sorted(seen)


def relative(text: str, depth: int) -> str:
    """A module's text with relative imports, and operators of this build's namespace."""
    up = "." * (depth + 1)
    text = re.sub(r"\bfrom bert_unpad import\b", f"from {up} import", text)
    text = re.sub(r"\bfrom bert_unpad\.", f"from {up}", text)
    if re.search(r"(?<!`)torch\.ops\.bert_unpad", text):
        text = re.sub(r"(?<!`)torch\.ops\.bert_unpad", "_hub.ops", text)
        text = text.replace("bert_unpad::{name}", "{_hub.add_op_namespace_prefix(name)}")
        text = text.replace('Library("bert_unpad", "IMPL")', 'Library(_hub.ops.name, "IMPL")')
        line = f"import torch\n\nfrom {up} import _ops as _hub\n"
        text = re.sub(r"^import torch\n", line, text, count=1, flags=re.M)
    return text


def in_namespace(text: str) -> str:
    """A source's text with its operators in the namespace of the build."""
    pattern = r"STABLE_TORCH_LIBRARY(_IMPL)?\(bert_unpad, "
    changed = re.sub(pattern, r"HUB_LIBRARY\1(", text)
    return text if changed == text else f'#include "hub_library.h"\n{changed}'


class Kernel:
    """The folder, and the sections of its build.toml."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sections: list[str] = []

    def write(self, name: str, text: str) -> str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return name

    def source(self, path: Path, isa: str = "") -> str:
        """Copies a source; its name in the folder."""
        name = str(path.relative_to(native.CSRC))
        if isa:
            name = f"isa/{isa}/{name.replace('/', '_')}"
        return self.write(f"csrc/{name}", in_namespace(path.read_text()))

    def section(self, title: str, /, **values: object) -> None:
        lines = (f"{key.replace('_', '-')} = {json.dumps(x)}\n" for key, x in values.items())
        self.sections.append(f"[{title}]\n{''.join(lines)}")

    def kernel(self, name: str, backend: str, src: list[str], **values: object) -> None:
        self.section(f"kernel.{name}", backend=backend, depends=["torch"], src=src, **values)


def operators(*patterns: str) -> list[Path]:
    """Sources of operators, right in csrc or in its folders."""
    return [path for path in native.sources(*patterns) if path.parent.name not in HOST_ONLY]


def write_kernel(folder: Path, repo: str) -> None:
    """Writes the folder, which has to be new or empty.

    Args:
        folder: made if it does not exist.
        repo: repository on the Hub that kernel-builder uploads to.

    Raises:
        FileExistsError: there is something in the folder.
    """
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"output: expected a new or empty folder, got {folder}")
    kernel = Kernel(folder)
    kernel.section(
        "general",
        name=NAME,
        version=0,
        edition=5,
        license="Apache-2.0",
        backends=["cpu", "cuda"],
    )
    kernel.section("general.hub", repo_id=repo)
    headers = [kernel.source(path) for path in operators("*/*.h")]
    headers.append(kernel.write("csrc/hub_library.h", LIBRARY))
    binding = kernel.write("torch-ext/torch_binding.cpp", BINDING)
    schemas = kernel.source(native.CSRC / "schemas.cpp")
    kernel.section("torch", src=[binding, schemas, *headers], stable_abi="2.11")

    once = operators("module_cpu.cpp", "cpu/*.cpp", "*/*_cpu.cpp")
    common = list(dict.fromkeys(map(kernel.source, once)))
    by_isa: dict[str, tuple[list[str], list[str]]] = {}
    for kind, sets in native.X86.items():
        for isa, options in sets.items():
            src, _ = by_isa.setdefault(isa, ([], [*CXX, "-fno-exceptions", *options]))
            src += [kernel.source(path, isa) for path in operators(f"*/*_{kind}.cpp")]
    for backend in ("cpu", "cuda"):  # a GPU's build has the CPU's operators too
        kernel.kernel(f"{backend}_common", backend, common, cxx_flags=CXX)
        for isa, (src, options) in by_isa.items():
            flags = [*options, f"-DBERT_UNPAD_ISA={isa}"]
            kernel.kernel(f"{backend}_{isa}", backend, src, cxx_flags=flags)
    archs = [*cuda_choice.ALL_ARCHS[:-1], f"{cuda_choice.ALL_ARCHS[-1]}+PTX"]
    host = [kernel.source(path) for path in operators("*_cuda.cpp", "*/*_cuda.cpp")]
    named = f"-DBERT_UNPAD_CUDA_ARCHS={archs[0]} to {archs[-1]}"
    kernel.kernel("gpu_host", "cuda", host, cxx_flags=[*CXX, named.replace(" ", "_")])
    device = operators("*/*.cu")
    hopper = [path for path in device if path.stem.endswith("_sm90a")]
    for name, files, capabilities in (
        ("gpu", [path for path in device if path not in hopper], archs),
        ("gpu_sm90a", hopper, ["9.0a"]),
    ):
        src = [kernel.source(path) for path in files]
        kernel.kernel(name, "cuda", src, cuda_capabilities=capabilities, cuda_flags=CUDA)

    kernel.write("build.toml", "\n".join(kernel.sections))
    kernel.write("flake.nix", FLAKE)
    kernel.write("CARD.md", CARD)
    package = f"torch-ext/{NAME.replace('-', '_')}"
    for name, text in PYTHON.items():
        kernel.write(f"{package}/{name}", text)
    for path in python_files():
        name = path.relative_to(ROOT / "bert_unpad")
        kernel.write(f"{package}/{name}", relative(path.read_text(), len(name.parts) - 1))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("output", type=Path, help="a new or empty folder")
    parser.add_argument("--repo", required=True, help="repository on the Hub, e.g. me/bert-unpad")
    args = parser.parse_args(argv)
    write_kernel(args.output, args.repo)


if __name__ == "__main__":
    main()
