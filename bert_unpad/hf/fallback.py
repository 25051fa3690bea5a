"""Warns when a call runs Hugging Face's own modules instead of packed ones, once per reason."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch.autograd import forward_ad


class StockFallbackWarning(UserWarning):
    """A call ran Hugging Face's own padded modules: the result is right, but not accelerated."""


_asked: ContextVar[bool] = ContextVar("bert_unpad_stock", default=False)


@contextmanager
def stock_modules() -> Iterator[None]:
    """Base models run their stock modules, for heads that pass on no argument that says so."""
    token = _asked.set(True)
    try:
        yield
    finally:
        _asked.reset(token)


def stock_is_asked() -> bool:
    """Whether this is within `stock_modules`, which cannot be compiled."""
    return not torch.compiler.is_compiling() and _asked.get()


_said: set[tuple[str, str]] = set()


def _in_onnx_export() -> bool:
    """Whether `torch.onnx.export` runs the model; plain `torch.export` keeps our operators."""
    return torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export()


def recording_reason() -> str | None:
    """Returns why what records or transforms this call cannot hold our operators, or None."""
    if torch.jit.is_tracing():
        return "the model is being traced"
    if _in_onnx_export():
        return "ONNX has none of its operators"
    if torch.compiler.is_compiling():
        return None
    if torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0:
        return "torch.func and forward-mode derivatives do not know its operators"
    return None


def warn_stock(where: str, reason: str) -> None:
    """Warns that `where` runs the stock modules, once per process and reason."""
    # An ONNX export counts as compiling, but runs this code in Python.
    if torch.compiler.is_compiling() and not _in_onnx_export():
        return
    if (where, reason) in _said:
        return
    _said.add((where, reason))
    warnings.warn(
        f"{where}: bert_unpad leaves this call to the stock modules, because {reason}",
        StockFallbackWarning,
        stacklevel=3,
    )
