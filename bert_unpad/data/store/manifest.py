"""Manifests: the file that names the other files of a folder of prepared data and proves them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from bert_unpad._files import read_json_object
from bert_unpad.data.text.sources import file_sha256

__all__ = [
    "MANIFEST",
    "DamagedDataError",
    "check_digest",
    "count_of",
    "read_manifest",
    "write_synced",
]

MANIFEST = "manifest.json"


class DamagedDataError(RuntimeError):
    """A file of prepared data is missing, truncated or altered."""


def write_synced(path: Path, text: str) -> None:
    """Write text and wait until it is on the disk (a rename may otherwise outlive its content)."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(path: Path, expected_format: str) -> dict[str, Any]:
    """Read a JSON manifest of a given format.

    Raises:
        DamagedDataError: it is missing, no JSON, or of another format.
    """
    try:
        manifest = read_json_object(path)
    except FileNotFoundError as error:
        raise DamagedDataError(f"{path} is missing; expected the manifest of this data") from error
    except ValueError as error:
        raise DamagedDataError(f"{error}; the manifest is damaged") from error
    found = manifest.get("format")
    if found != expected_format:
        raise DamagedDataError(f"{path}: expected format {expected_format!r}, found {found!r}")
    return manifest


def check_digest(path: Path, expected: str) -> None:
    """Raise DamagedDataError, naming the file, unless its SHA-256 is `expected`."""
    try:
        found = file_sha256(path)
    except FileNotFoundError as error:
        raise DamagedDataError(f"{path} is missing; expected SHA-256 {expected}") from error
    if found != expected:
        raise DamagedDataError(f"{path} was altered: expected SHA-256 {expected}, found {found}")


def count_of(entry: dict[str, Any], name: str, most: int) -> int:
    """A number of 0 to `most` in a part of a manifest.

    Raises:
        KeyError: there is none of this name.
        ValueError: it is no such number.
    """
    value = entry[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise ValueError(f"{name}: 0 to {most:,}, got {value!r}")
    return value
