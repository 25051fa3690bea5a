"""Entries of tables: classes, functions, or import paths of those that few runs import."""

from importlib import import_module
from typing import Any, TypeVar

Entry = TypeVar("Entry")


def resolve(entry: Entry | str) -> Entry:
    """An entry, or what its import path, such as `torch.optim.SGD`, leads to."""
    if not isinstance(entry, str):
        return entry
    module, _, name = entry.rpartition(".")
    return getattr(import_module(module), name)


def path_of(entry: Any) -> str:
    """The import path of a class or function, or the one that an entry is."""
    return entry if isinstance(entry, str) else f"{entry.__module__}.{entry.__qualname__}"
