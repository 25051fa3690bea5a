"""Files of documents that are not plain text: compressed text, JSON Lines, dumps of MediaWiki.

What a file is follows from its name: a compressed one has one more ending.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from bert_unpad.data.compressed import ENDINGS, open_file
from bert_unpad.data.text.mediawiki import articles
from bert_unpad.data.text.sources import LONGEST_FILE, TEXT_SUFFIXES, file_sha256, text_documents

FORMATS: dict[str, tuple[str, ...]] = {
    "text": TEXT_SUFFIXES,
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "mediawiki": (".xml",),
}
"""The formats, and the endings of their files."""
_AMBIGUOUS = ".json"  # in a folder it is rather about the data than the data


def format_of(path: Path) -> str | None:
    """Returns the format that a file's name says; None if it says none."""
    name = Path(path.name.lower())
    if name.suffix in ENDINGS:
        name = name.with_suffix("")
    suffix = name.suffix.partition("-p")[0]  # Wikipedia has parts NAME.xml-p1p41242.bz2
    return next((kind for kind, endings in FORMATS.items() if suffix in endings), None)


def find_files(path: Path, wanted: str | None = None) -> list[tuple[Path, str]]:
    """Returns a file, or the files of documents below a folder in the order of their paths.

    Args:
        path: a file or a folder.
        wanted: take this format; None for all, by the files' names.

    Returns:
        Files and their formats; none for a folder without such files.
    """
    if path.is_file():
        return [(path, wanted or format_of(path) or "text")]
    found = []
    for file in sorted(path.rglob("*")):
        kind = format_of(file)
        named = file.suffix.lower() != _AMBIGUOUS if wanted is None else kind == wanted
        shown = not any(part.startswith(".") for part in file.relative_to(path).parts)
        if kind is not None and named and shown and file.is_file():
            found.append((file, kind))
    return found


def is_plain(path: Path, kind: str, wanted: str = "text") -> bool:
    """Whether a file has a format, plain text unless said otherwise, and is not compressed."""
    return kind == wanted and path.suffix.lower() not in ENDINGS


class FileSource:
    """Documents in files of several formats.

    In text, a blank line ends a document, or the file does. In JSON Lines, a line is an object
    whose entry `column` is a document. In a dump of MediaWiki, an article is a document.

    Args:
        path: names the source.
        files: files and their formats, from `find_files`.
        file_per_document: whether a whole file of text is one document.
        column: name of the entry with the text.
    """

    def __init__(
        self,
        path: Path,
        files: list[tuple[Path, str]],
        file_per_document: bool = False,
        column: str = "text",
    ) -> None:
        self.name = str(path)
        self.files = [file for file, _ in files]
        self.file_per_document = file_per_document
        self.column = column
        self.formats = files

    def part(self, files: list[tuple[Path, str]]) -> FileSource:
        """Returns a source of some of the files, read in the same way."""
        return FileSource(Path(self.name), files, self.file_per_document, self.column)

    def fingerprint(self) -> str:
        """See `Source`."""
        settings = ["files, version 1", self.file_per_document, self.column]
        digests = [[kind, file_sha256(file)] for file, kind in self.formats]
        return hashlib.sha256(json.dumps([*settings, digests]).encode()).hexdigest()

    def documents(self) -> Iterator[str]:
        """See `Source`.

        Raises:
            DamagedDataError: a file is cut off or not what its name says; the message names it.
            ImportError: a package is not installed.
            ValueError: a file is not UTF-8, or a line has no text; the message names it.
        """
        for path, kind in self.formats:
            with open_file(path) as file:
                if kind == "jsonl":
                    yield from self._lines(path, file)
                elif kind == "mediawiki":
                    yield from articles(file, path)
                else:
                    text = io.TextIOWrapper(file, encoding="utf-8-sig")
                    yield from text_documents(path, text, self.file_per_document)

    def _lines(self, path: Path, file: BinaryIO) -> Iterator[str]:
        lines = iter(lambda: file.readline(LONGEST_FILE), b"")
        for number, line in enumerate(lines, 1):
            if text := self.document_of(line, f"{path}: line {number}"):
                yield text

    def document_of(self, line: bytes, where: str) -> str | None:
        """Returns the document in a line of JSON Lines; None, or no text, where it has none.

        Args:
            line: the line, or the first `LONGEST_FILE` bytes of a longer one.
            where: its place, for the error.

        Raises:
            ValueError: the line has no text; the message has `where`.
        """
        if line.isspace():
            return None
        if len(line) == LONGEST_FILE:
            raise self._no_document(where, f"{len(line):,} bytes or more")
        try:
            row: Any = json.loads(line)
            text = row[self.column] if isinstance(row, dict) else row
        except (ValueError, RecursionError, KeyError) as error:
            raise self._no_document(where, f"{error!r:.200}") from error
        if not isinstance(row, dict) or not isinstance(text, str | None):
            raise self._no_document(where, type(text).__name__)
        return text

    def _no_document(self, where: str, found: str) -> ValueError:
        return ValueError(
            f"source: {where}: expected a JSON object with text as its entry "
            f"{self.column!r} (option column=...), got {found}"
        )
