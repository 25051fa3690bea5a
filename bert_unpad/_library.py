"""Loads the compiled modules, which registers `torch.ops.bert_unpad.*`.

`_C` holds the schemas and the CPU operators; `_C_cuda` the CUDA operators, loaded only under a CUDA
build of PyTorch. An error while loading is stored here instead of being raised, because `python -m
bert_unpad.info`, which reports it, imports the package too.
"""

import importlib
import re
import warnings
from pathlib import Path

import torch

MINIMUM_TORCH = (2, 11)

_INSTALL = "`pip install .` (or `pip install -e .` in a checkout)"

cpu_missing: str | None = "it was not loaded yet"
"""Why `_C` is not loaded, or None."""
cuda_missing: str | None = "it was not loaded yet"
"""Why `_C_cuda` is not loaded, or None."""


def load() -> None:
    """Loads the compiled modules; warns if `_C`, or a `_C_cuda` that was built, cannot load."""
    global cpu_missing, cuda_missing
    cpu_missing = _old_torch() or _import("_C")
    if cpu_missing:
        cuda_missing = "bert_unpad._C is not loaded"
        warnings.warn(f"bert_unpad's operators are missing: {cpu_missing}", stacklevel=3)
    elif torch.version.cuda is None:
        cuda_missing = "this PyTorch is built without CUDA"
    else:
        cuda_missing = _import("_C_cuda")
        if cuda_missing and built_files("_C_cuda"):
            warnings.warn(f"bert_unpad's CUDA operators are missing: {cuda_missing}", stacklevel=3)


def require() -> None:
    """Raises an ImportError if the operators are not loaded."""
    if cpu_missing:
        raise ImportError(f"bert_unpad's operators are missing: {cpu_missing}")


def built_files(module: str) -> list[str]:
    """Returns the files of a compiled module, for any version of Python."""
    return sorted(path.name for path in Path(__file__).parent.glob(f"{module}.*so"))


def _old_torch() -> str | None:
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if version >= MINIMUM_TORCH:
        return None
    wanted = ".".join(map(str, MINIMUM_TORCH))
    return f"bert_unpad needs PyTorch >= {wanted}, but {torch.__version__} is installed"


def _import(module: str) -> str | None:
    """Imports a compiled module; returns why that failed, or None."""
    try:
        importlib.import_module(f"bert_unpad.{module}")
    except ModuleNotFoundError:
        files = built_files(module)
        if files:
            return f"built for another Python ({', '.join(files)}); install again with {_INSTALL}"
        if module == "_C_cuda":
            return (
                "not built: install again on a machine with nvcc, a GPU and a PyTorch with CUDA; "
                "BERT_UNPAD_CUDA=1 builds it without the latter two"
            )
        return f"not built; install the package with {_INSTALL}"
    except ImportError as error:
        return f"cannot be loaded: {error}"
    return None
