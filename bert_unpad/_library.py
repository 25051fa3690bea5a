"""Loads the compiled modules, which registers `torch.ops.bert_unpad.*`.

`_C` holds the schemas and the CPU operators and must load. `_C_cuda` holds the CUDA operators and is
loaded only under a CUDA build of PyTorch; why it was not is kept for `python -m bert_unpad.info`.
"""

import importlib

import torch

MINIMUM_TORCH = (2, 11)


def _check_torch() -> None:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < MINIMUM_TORCH:
        raise ImportError(
            f"bert_unpad needs PyTorch >= {'.'.join(map(str, MINIMUM_TORCH))}, "
            f"but {torch.__version__} is installed"
        )


def _load_cuda() -> str | None:
    """Loads `_C_cuda`; returns why it is not loaded, or None."""
    if torch.version.cuda is None:
        return "this PyTorch is built without CUDA"
    try:
        importlib.import_module("bert_unpad._C_cuda")
    except ModuleNotFoundError:
        return "the CUDA operators were not built (no nvcc when bert_unpad was installed)"
    return None


_check_torch()
try:
    importlib.import_module("bert_unpad._C")
except ModuleNotFoundError as error:
    raise ImportError(
        "bert_unpad's compiled operators are missing; install the package with `pip install .` "
        "(or `pip install -e .` in a checkout)"
    ) from error

cuda_missing: str | None = _load_cuda()
