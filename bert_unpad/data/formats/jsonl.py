"""JSON Lines: a line is an object with a document as one of its entries."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from bert_unpad.data.formats.text import LONGEST_FILE


def documents(file: BinaryIO, path: Path, column: str) -> Iterator[str]:
    """Yields the documents of a file; errors as of `document_of`."""
    lines = iter(lambda: file.readline(LONGEST_FILE), b"")
    for number, line in enumerate(lines, 1):
        if text := document_of(line, column, f"{path}: line {number}"):
            yield text


def document_of(line: bytes, column: str, where: str) -> str | None:
    """Returns the document in a line; None, or no text, where it has none.

    Args:
        line: the line, or the first `LONGEST_FILE` bytes of a longer one.
        column: name of the entry with the text.
        where: its place, for the error.
    """

    def wrong(found: str) -> ValueError:
        return ValueError(
            f"source: {where}: expected a JSON object with text as its entry {column!r} (option "
            f"column=...), got {found}"
        )

    if line.isspace():
        return None
    if len(line) == LONGEST_FILE:
        raise wrong(f"{len(line):,} bytes or more")
    try:
        row: Any = json.loads(line)
        text = row[column] if isinstance(row, dict) else row
    except (ValueError, RecursionError, KeyError) as error:
        raise wrong(f"{error!r:.200}") from error
    if not isinstance(row, dict) or not isinstance(text, str | None):
        raise wrong(type(text).__name__)
    return text
