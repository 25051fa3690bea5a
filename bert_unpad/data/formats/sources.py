"""Sources of text: what a `DataConfig.source` names.

A source yields whole documents as strings. Its `fingerprint` identifies the content without
yielding it, so that a cache of the same content is found again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qsl

from bert_unpad._files import file_sha256
from bert_unpad.data.formats import jsonl, mediawiki, text
from bert_unpad.data.formats.compressed import ENDINGS, open_file
from bert_unpad.data.formats.hugging_face import HuggingFaceSource
from bert_unpad.data.formats.stdlib import StdlibSource

_ENDINGS: dict[str, tuple[str, ...]] = {
    "text": ("", ".txt", ".text", ".md", ".rst"),
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "mediawiki": (".xml",),
}
"""The formats of files, and the endings of their names; a compressed file has one more."""
_AMBIGUOUS = ".json"  # in a folder it is rather about the data than the data
_OPTIONS = {"file_per_document": ("true", "false"), "format": tuple(_ENDINGS), "column": ("NAME",)}


class Source(Protocol):
    """A corpus: an iterable of documents with a name and a content fingerprint."""

    name: str

    def documents(self) -> Iterator[str]:
        """Yields one document (str) at a time, always in the same order."""

    def fingerprint(self) -> str:
        """Returns a hex SHA-256 that changes whenever the documents do."""


class TextFiles:
    """Documents in files of one or more formats.

    Args:
        name: names the source.
        files: files and their formats, in order.
        file_per_document: whether a whole file of text is one document.
        column: name of the entry with the text, in JSON Lines.
    """

    def __init__(
        self,
        name: str,
        files: list[tuple[Path, str]],
        file_per_document: bool = False,
        column: str = "text",
    ) -> None:
        self.name, self.files = name, files
        self.file_per_document, self.column = file_per_document, column

    @property
    def paths(self) -> list[Path]:
        return [path for path, _ in self.files]

    def part(self, files: list[tuple[Path, str]]) -> TextFiles:
        """Returns a source of some of the files, read in the same way."""
        return TextFiles(self.name, files, self.file_per_document, self.column)

    def all_plain(self, kind: str) -> bool:
        """Whether all files have a format and none is compressed, so that they can be cut."""
        return all(
            found == kind and path.suffix.lower() not in ENDINGS for path, found in self.files
        )

    def fingerprint(self) -> str:
        """See `Source`."""
        digests = [[kind, file_sha256(path)] for path, kind in self.files]
        whole = self.file_per_document
        if self.all_plain("text"):
            about = f"text, version 1, file per document: {whole:d}"
            return hashlib.sha256("".join([about, *(x for _, x in digests)]).encode()).hexdigest()
        settings = ["files, version 1", whole, self.column, digests]
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()

    def identity(self) -> str:
        """A digest of paths, sizes and times, and of how the files are read."""
        about: list[Any] = [self.file_per_document]
        if not self.all_plain("text"):
            about += [self.column, [kind for _, kind in self.files]]
        states = ((str(path.resolve()), path.stat()) for path in self.paths)
        about += [(path, state.st_size, state.st_mtime_ns) for path, state in states]
        return hashlib.sha256(json.dumps(about).encode()).hexdigest()

    def documents(self) -> Iterator[str]:
        """See `Source`."""
        for path, kind in self.files:
            with open_file(path) as file:
                if kind == "jsonl":
                    yield from jsonl.documents(file, path, self.column)
                elif kind == "mediawiki":
                    yield from mediawiki.documents(file, path)
                else:
                    yield from text.documents(file, path, self.file_per_document)


def open_source(source: str, *, cache_dir: Path) -> Source:
    """Makes a `Source` from the `source` of a `DataConfig`.

    Args:
        source: `stdlib`, `hf:NAME?...` (see `HuggingFaceSource`), or `PATH` or
            `PATH?option=value&...` with the options `file_per_document`, `format` and `column`.
        cache_dir: folder where a source may keep documents that are slow to collect.

    Raises:
        FileNotFoundError: the path does not exist, or has no file of a known or of that format.
        ImportError, ValueError: a package is missing, or an option is wrong.
    """
    if source == "stdlib":
        return StdlibSource(cache_dir / "documents")
    if source.startswith("hf:"):
        return HuggingFaceSource(source.removeprefix("hf:"))
    if not source:
        raise ValueError("source: expected 'stdlib', 'hf:NAME' or a path, got an empty string")
    path, _, query = source.partition("?")
    if not query or Path(source).expanduser().exists():  # a name may have a question mark
        return open_files(Path(source).expanduser())
    options = dict(parse_qsl(query, keep_blank_values=True))
    wrong = {
        name
        for name, value in options.items()
        if not value or (value not in _OPTIONS.get(name, ()) and name != "column")
    }
    if not options or wrong:
        forms = "&".join(f"{name}={'|'.join(values)}" for name, values in _OPTIONS.items())
        raise ValueError(f"source: expected PATH or PATH?{forms}, got {source!r}")
    return open_files(
        Path(path).expanduser(),
        options.get("file_per_document") == "true",
        options.get("format"),
        options.get("column"),
    )


def open_files(
    path: Path,
    file_per_document: bool = False,
    wanted: str | None = None,
    column: str | None = None,
) -> TextFiles:
    """Opens a file, or the files below a folder in the order of their paths; see `open_source`."""
    if not path.exists():
        raise FileNotFoundError(
            f"source: {path} does not exist; expected 'stdlib', 'hf:NAME', or the path of a text "
            "file or of a folder of text files"
        )
    files = _find(path, wanted)
    if not files and wanted is not None:
        raise FileNotFoundError(f"source: expected files of format {wanted} below {path}, got none")
    if column is not None and not any(kind == "jsonl" for _, kind in files):
        raise ValueError(f"source: expected JSON Lines at {path} with the option column, got none")
    if not files:
        raise FileNotFoundError(
            f"source: no text file below {path}; expected names ending in one of "
            f"{', '.join(map(repr, _ENDINGS['text']))}"
        )
    return TextFiles(str(path), files, file_per_document, column or "text")


def _find(path: Path, wanted: str | None) -> list[tuple[Path, str]]:
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


def format_of(path: Path) -> str | None:
    """Returns the format that a file's name says; None if it says none."""
    name = Path(path.name.lower())
    if name.suffix in ENDINGS:
        name = name.with_suffix("")
    suffix = name.suffix.partition("-p")[0]  # Wikipedia has parts NAME.xml-p1p41242.bz2
    return next((kind for kind, endings in _ENDINGS.items() if suffix in endings), None)
