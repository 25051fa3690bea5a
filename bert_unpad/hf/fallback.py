"""What is said when a call is left to the stock modules: visible, and once for each reason."""

from __future__ import annotations

import warnings

import torch

__all__ = ["StockFallbackWarning", "warn_stock"]


class StockFallbackWarning(UserWarning):
    """A call ran through Hugging Face's own padded modules: right, but not accelerated."""


_said: set[tuple[str, str]] = set()


def warn_stock(where: str, reason: str) -> None:
    """Warns that `where` runs the stock modules; once in a process for each reason."""
    if torch.compiler.is_compiling() or (where, reason) in _said:
        return
    _said.add((where, reason))
    warnings.warn(
        f"{where}: bert_unpad leaves this call to the stock modules, because {reason}",
        StockFallbackWarning,
        stacklevel=3,
    )
