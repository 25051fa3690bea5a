"""Files that appear whole or not at all, and JSON files from outside."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["read_json_object", "replacing", "set_aside", "sync_folder", "write_text"]


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path beside `path`, renamed to it if the block succeeds, removed if it raises.

    A reader sees the old file or the new one, never a part; the process id in the name keeps
    writers apart.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a file of UTF-8 by `replacing`."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def set_aside(path: Path, ending: str) -> Path:
    """Renames a file or folder to `<path>.<ending>-<n>`, with the first n that is free.

    Returns:
        The new path.
    """
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.{ending}-{number}")):
        number += 1
    os.rename(path, aside)
    return aside


def sync_folder(path: Path) -> None:
    """Makes new names in the folder survive a power failure."""
    if os.name == "posix":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def read_json_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a JSON file that holds an object.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds something else, or is damaged; the message names the file.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path} does not exist; expected a JSON file") from error
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, or nested too deeply
        raise ValueError(f"{path}: expected JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(found).__name__}")
    return found
