"""BERT training without padding: PyTorch operators, modules and a load-balanced trainer.

Importing the package registers `torch.ops.bert_unpad.*`. If the compiled operators cannot be
loaded, it warns, and everything that needs them (such as `bert_unpad.ops`) raises an ImportError
that says why; `python -m bert_unpad.info` still works.
"""

__version__ = "0.1.0"

import importlib

from bert_unpad import _library

_library.load()


def __getattr__(name: str):
    # bert_unpad.hf imports transformers, which takes seconds and need not be installed.
    if name == "hf":
        return importlib.import_module("bert_unpad.hf")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
