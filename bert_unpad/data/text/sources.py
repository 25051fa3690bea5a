"""Sources of documents: Python's standard library, text files, or a Hugging Face data set.

A source yields whole documents as strings. Its `fingerprint` identifies the content without
yielding it, so that a cache of the same content is found again. The standard library is the default
because every machine that runs this package has it: real English text without a download. Its files
are parsed, not imported, because importing would run their code.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import json
import logging
import os
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO
from urllib.parse import parse_qsl

from bert_unpad._files import file_sha256, read_json_object, write_text
from bert_unpad.data.text.document_files import TEXT_SUFFIXES, find_files, is_plain

logger = logging.getLogger(__name__)

LONGEST_DOCUMENT = 8 << 20
"""Characters of a document that no blank line ends."""
LONGEST_FILE = 128 << 20
"""Characters, or bytes, of a file that is one document, or of a line of JSON."""
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_HF_OPTIONS = ("config", "split", "column", "revision", "data_files", "streaming", "limit")


class Source(Protocol):
    """A corpus: an iterable of documents with a name and a content fingerprint."""

    name: str

    def documents(self) -> Iterator[str]:
        """Yields one document (str) at a time, always in the same order."""

    def fingerprint(self) -> str:
        """Returns a hex SHA-256 that changes whenever the documents do."""


class StdlibSource:
    """Docstrings of Python's standard library and the topics of its help system.

    Each docstring or topic is one document. Tests (whose docstrings are fixtures) and installed
    packages are left out. Parsing takes seconds, so `cache_dir` keeps the documents.
    """

    name = "stdlib"

    def __init__(self, cache_dir: Path, root: Path | None = None) -> None:
        self.root = root or Path(sysconfig.get_paths()["stdlib"])
        self.cache_dir = cache_dir
        self._fingerprint: str | None = None

    def files(self) -> list[Path]:
        """Returns the source files (*.py) in a fixed order."""
        found = []
        for folder, subfolders, names in os.walk(self.root):
            subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
            found += [Path(folder, name) for name in names if name.endswith(".py")]
        return sorted(found)

    def by_file(self) -> Iterator[tuple[Path, str]]:
        """Yields (source file, document) for every document, without the cache."""
        for path in self.files():
            for text in _texts_of_module(path):
                yield path, text

    def fingerprint(self) -> str:
        if self._fingerprint is None:
            digest = hashlib.sha256(b"docstrings and topics, version 1")
            for path in self.files():
                digest.update(path.relative_to(self.root).as_posix().encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def documents(self) -> Iterator[str]:
        cached = self.cache_dir / f"stdlib-{self.fingerprint()[:32]}.json"
        documents = _read_document_cache(cached)
        if documents is None:
            documents = [text for _, text in self.by_file()]
            _write_document_cache(cached, documents)
        if not documents:
            raise ValueError(
                f"source='stdlib': no docstring found below {self.root}; expected the sources of "
                "Python's standard library there (is only the bytecode installed?)"
            )
        yield from documents


def _texts_of_module(path: Path) -> Iterator[str]:
    """Returns a module's docstrings in the order of the file, or the texts of the help topics."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old modules have invalid escapes; not ours to report
        try:
            tree = ast.parse(path.read_bytes(), filename=str(path))
        except SyntaxError:  # templates and deliberately broken files exist in the library
            logger.debug("not parsed: %s", path)
            return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text
    if path.parts[-2:] == ("pydoc_data", "topics.py"):
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
                yield from ast.literal_eval(node.value).values()


def _read_document_cache(path: Path) -> list[str] | None:
    if not path.exists():
        return None
    try:
        stored = read_json_object(path)
        documents = stored["documents"]
        intact = isinstance(documents, list) and all(isinstance(text, str) for text in documents)
        intact = intact and stored["sha256"] == _documents_sha256(documents)
    except (ValueError, KeyError):
        intact = False
    if not intact:
        logger.warning("%s is damaged (its digest does not fit): collecting it again", path)
        return None
    return documents


def _write_document_cache(path: Path, documents: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    stored = {"sha256": _documents_sha256(documents), "documents": documents}
    write_text(path, json.dumps(stored))


def _documents_sha256(documents: list[str]) -> str:
    return hashlib.sha256(json.dumps(documents).encode()).hexdigest()


class TextSource:
    """A UTF-8 text file, or every text file below a folder in the order of their paths.

    Files of other formats, and compressed ones, are those of `FileSource`.

    Args:
        path: a file, or a folder, whose files with a suffix of `TEXT_SUFFIXES` are read.
        file_per_document: whether a whole file is one document. Otherwise a blank line ends a
            document, the format of Google's BERT.
        files: the files, where they have been looked for.

    Raises:
        FileNotFoundError: `path` does not exist, or the folder has no text file.
    """

    def __init__(
        self, path: Path, file_per_document: bool = False, files: Sequence[Path] | None = None
    ) -> None:
        self.name = str(path)
        self.file_per_document = file_per_document
        if files is None:
            files = [file for file, kind in find_files(path, "text") if is_plain(file, kind)]
        if not path.exists():
            raise FileNotFoundError(
                f"source: {path} does not exist; expected 'stdlib', 'hf:NAME', "
                "or the path of a text file or of a folder of text files"
            )
        if not files:
            suffixes = ", ".join(repr(suffix) for suffix in TEXT_SUFFIXES)
            raise FileNotFoundError(
                f"source: no text file below {path}; expected names ending in one of {suffixes}"
            )
        self.files = list(files)

    def fingerprint(self) -> str:
        digest = hashlib.sha256(b"text, version 1, file per document: %d" % self.file_per_document)
        for file in self.files:
            digest.update(file_sha256(file).encode())
        return digest.hexdigest()

    def documents(self) -> Iterator[str]:
        for path in self.files:
            with path.open(encoding="utf-8-sig") as file:
                yield from text_documents(path, file, self.file_per_document)


def text_documents(path: Path, file: TextIO, file_per_document: bool) -> Iterator[str]:
    """Yields the documents of a text file; see `TextSource`.

    A document is cut at a line end where it would become longer than `LONGEST_DOCUMENT`, or
    `LONGEST_FILE` if it is a file; so memory is bounded whatever the text.

    Raises:
        ValueError: the file is not UTF-8; the message names it.
    """
    try:
        if file_per_document:
            while text := file.read(LONGEST_FILE):
                yield text + file.readline(LONGEST_DOCUMENT)
            return
        lines: list[str] = []
        size = 0
        while line := file.readline(LONGEST_DOCUMENT):
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


class HuggingFaceSource:
    """A data set of the Hugging Face `datasets` library; each row is one document.

    Args:
        specification: `NAME` or `NAME?option=value&...` with the options `config`, `split`
            (default train), `column` (default text), `revision`, `data_files`, `streaming`
            (true or false, default false) and `limit` (number of rows).

    A streamed data set has no content digest. Its name, options and version identify it, so set
    `revision` if it may change. Reading can be interrupted and resumed (`position`) with versions
    of `datasets` whose streams have a state.

    Raises:
        ImportError: `datasets` is not installed.
        ValueError: an option or the column is unknown.
    """

    def __init__(self, specification: str) -> None:
        self.name = f"hf:{specification}"
        self.path, _, query = specification.partition("?")
        options = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
        unknown = sorted(set(options) - set(_HF_OPTIONS))
        if unknown or not self.path:
            raise ValueError(
                f"source={self.name!r}: expected hf:NAME?option=value&... with options among "
                f"{', '.join(_HF_OPTIONS)}" + (f"; got {', '.join(unknown)}" if unknown else "")
            )
        streaming = options.get("streaming", "false").lower()
        if streaming not in ("true", "false"):
            raise ValueError(f"source={self.name!r}: streaming must be true or false")
        limit = options.get("limit")
        if limit is not None and (not limit.isdecimal() or int(limit) < 1):
            raise ValueError(f"source={self.name!r}: limit must be a positive number of rows")
        self.options = options
        self.streaming = streaming == "true"
        self.column = options.get("column", "text")
        self.limit = int(limit) if limit else None
        self._dataset: Any = None
        self.position: dict[str, Any] | None = None
        """The position of `documents`, as JSON values, before the last block of 1,000 rows it read.

        None within the first block, or if the stream cannot resume.
        """

    def load(self) -> Any:
        """Opens the data set with `datasets`."""
        if self._dataset is None:
            try:
                datasets = importlib.import_module("datasets")
            except ImportError as error:
                raise ImportError(
                    f"source={self.name!r} needs the package `datasets`: "
                    "pip install 'bert_unpad[datasets]'"
                ) from error
            dataset = datasets.load_dataset(
                self.path,
                self.options.get("config"),
                split=self.options.get("split", "train"),
                revision=self.options.get("revision"),
                data_files=self.options.get("data_files"),
                streaming=self.streaming,
            )
            columns = dataset.column_names  # None while a stream has not been looked into
            if columns is not None and self.column not in columns:
                raise ValueError(
                    f"source={self.name!r}: no column {self.column!r}; expected one of "
                    f"{', '.join(columns)} (option column=...)"
                )
            self._dataset = dataset
        return self._dataset

    def fingerprint(self) -> str:
        dataset = self.load()
        content = None if self.streaming else dataset._fingerprint
        version = str(getattr(dataset.info, "version", None))
        return hashlib.sha256(
            json.dumps(["hf, version 1", self.name, version, content]).encode()
        ).hexdigest()

    def documents(self, position: dict[str, Any] | None = None) -> Iterator[str]:
        """See `Source`.

        Args:
            position: an earlier value of `position` to continue from.
        """
        dataset, left = self.load(), self.limit
        if position is not None:
            dataset.load_state_dict(position["stream"])
            left = position["left"]
        resumable = self.streaming and hasattr(dataset, "state_dict")
        for batch in dataset.iter(batch_size=1000):
            if self.column not in batch:
                raise ValueError(
                    f"source={self.name!r}: no column {self.column!r}; expected one of "
                    f"{', '.join(batch)} (option column=...)"
                )
            texts = batch[self.column] if left is None else batch[self.column][:left]
            yield from (text for text in texts if text)
            if left is not None:
                left -= len(texts)
                if not left:
                    return
            if resumable:  # reached when the consumer has taken the last text of the batch
                self.position = {"stream": dataset.state_dict(), "left": left}
