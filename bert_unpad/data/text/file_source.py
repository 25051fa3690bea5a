"""Files of documents that are not plain text: compressed text, JSON Lines, dumps of MediaWiki."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from bert_unpad._files import file_sha256
from bert_unpad.data.compressed import open_file
from bert_unpad.data.text.mediawiki import articles
from bert_unpad.data.text.sources import LONGEST_FILE, text_documents


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
