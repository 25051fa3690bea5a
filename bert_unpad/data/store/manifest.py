"""Manifests: the file of a data folder that lists the other files, their sizes and digests."""

from pathlib import Path
from typing import Any

from bert_unpad._files import file_sha256, read_json_object

MANIFEST = "manifest.json"


class DamagedDataError(RuntimeError):
    """A file of prepared data is missing, truncated or altered."""


def read_manifest(path: Path, expected_format: str) -> dict[str, Any]:
    """Reads a JSON manifest of a given format."""
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


def check_size(path: Path, expected: int) -> None:
    """Raises a DamagedDataError that names the file unless it has so many bytes."""
    try:
        found = path.stat().st_size
    except FileNotFoundError as error:
        raise DamagedDataError(f"{path} is missing; expected {expected:,} bytes") from error
    if found != expected:
        raise DamagedDataError(f"{path} has {found:,} bytes; expected {expected:,} bytes")


def check_digest(path: Path, expected: str) -> None:
    """Raises a DamagedDataError that names the file unless its SHA-256 is `expected`."""
    try:
        found = file_sha256(path)
    except FileNotFoundError as error:
        raise DamagedDataError(f"{path} is missing; expected SHA-256 {expected}") from error
    if found != expected:
        raise DamagedDataError(f"{path} was altered: expected SHA-256 {expected}, found {found}")


def count_of(entry: dict[str, Any], name: str, most: int) -> int:
    """Returns an entry of a manifest that must be an integer from 0 to `most`.

    Raises:
        KeyError: there is no entry of this name.
        ValueError: the entry is not such a number.
    """
    value = entry[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise ValueError(f"{name}: 0 to {most:,}, got {value!r}")
    return value
