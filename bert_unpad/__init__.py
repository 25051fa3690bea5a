"""BERT training without padding: PyTorch operators, modules and a load-balanced trainer.

Importing the package registers `torch.ops.bert_unpad.*`. If the compiled operators cannot be
loaded, it warns, and everything that needs them (such as `bert_unpad.ops`) raises an ImportError
that says why; `python -m bert_unpad.info` still works.
"""

__version__ = "0.1.0"

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from bert_unpad import _library

if TYPE_CHECKING:
    from bert_unpad import batch, convert, data, distributed, flash, hf, nn, ops, optim

__all__ = ["batch", "convert", "data", "distributed", "flash", "hf", "nn", "ops", "optim"]

_library.load()


def __getattr__(name: str) -> ModuleType:
    # On first use: bert_unpad.hf imports transformers, which takes seconds and need not be there.
    if name in __all__:
        return importlib.import_module(f"bert_unpad.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
