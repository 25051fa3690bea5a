"""Plain text: a blank line ends a document (the format of Google's BERT), or the file does."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

LONGEST_DOCUMENT = 8 << 20
"""Characters of a document that no blank line ends."""
LONGEST_FILE = 128 << 20
"""Characters, or bytes, of a file that is one document, or of a line of JSON."""


def documents(file: BinaryIO, path: Path, file_per_document: bool) -> Iterator[str]:
    """Yields the documents of a file.

    A document is cut at a line end where it would become longer than `LONGEST_DOCUMENT`, or
    `LONGEST_FILE` if it is a file; so memory is bounded whatever the text.
    """
    text = io.TextIOWrapper(file, encoding="utf-8-sig")
    try:
        if file_per_document:
            while part := text.read(LONGEST_FILE):
                yield part + text.readline(LONGEST_DOCUMENT)
            return
        lines: list[str] = []
        size = 0
        while line := text.readline(LONGEST_DOCUMENT):
            blank = line.isspace()
            if not blank:
                lines.append(line)
                size += len(line)
            if lines and (blank or size >= LONGEST_DOCUMENT):
                yield "".join(lines)
                lines, size = [], 0
        if lines:
            yield "".join(lines)
    except UnicodeDecodeError as error:
        raise ValueError(f"source: {path} is not UTF-8 text: {error}") from error
