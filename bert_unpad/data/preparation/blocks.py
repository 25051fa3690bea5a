"""Cuts a corpus into blocks: the unit of work, and of every random choice.

A block is a pure function of the corpus, so the result does not depend on who works on which block.
Text files are cut by bytes, between documents, JSON Lines between lines, and data sets of the
`datasets` library between rows; any worker can read any block of these. Other sources are read in
order, see `ordered_sources.py`.
"""

import codecs
import functools
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from bert_unpad.data.formats.hugging_face import HuggingFaceSource
from bert_unpad.data.formats.jsonl import document_of
from bert_unpad.data.formats.sources import Source, TextFiles
from bert_unpad.data.formats.text import LONGEST_FILE
from bert_unpad.data.text.sentences import CleanText, clean

BLOCK_BYTES = 8 << 20
_GROW_EVERY = 512  # blocks; so a corpus of 1 TB has 10,000 blocks
_MOST_DOUBLINGS = 4
_WINDOW = 1 << 20  # bytes in which a cut looks for the end of a document
_ROWS = 1000  # of a data set, read at a time
_BOM = codecs.BOM_UTF8


def block_bytes(number: int, first: int) -> int:
    """The size that block `number` aims at, where the first ones have `first` bytes.

    Blocks become larger, so that a small corpus keeps several workers busy and a large one has no
    millions of files. A growing corpus keeps the blocks that it has.
    """
    return first << min(number // _GROW_EVERY, _MOST_DOUBLINGS)


class Block(Protocol):
    """A part of a corpus that any worker can read."""

    def read(self) -> Iterator[CleanText]:
        """Yields the documents of the block, some at a time."""


def cut(source: Source, first: int) -> Sequence[Block] | None:
    """Cuts a corpus into blocks; None for a source that has to be read in order."""
    if isinstance(source, TextFiles) and source.all_plain("text"):
        whole = source.file_per_document
        parts = _extents(source.paths, first, LONGEST_FILE if whole else None)
        return [FileBlock(extents, whole) for extents in parts]
    if isinstance(source, TextFiles) and source.all_plain("jsonl"):
        return [LineBlock(extents, source.column) for extents in _extents(source.paths, first)]
    if isinstance(source, HuggingFaceSource) and not source.streaming:
        return _row_blocks(source, first)
    return None


def identity(source: Source) -> str | None:
    """Changes when the content of a source does; None if that cannot be told without reading it."""
    if isinstance(source, TextFiles):
        return source.identity()
    return source.fingerprint() if isinstance(source, HuggingFaceSource) else None


def check_outside(name: str, folder: Path, source: Source) -> None:
    """Raises a ValueError if files in a folder would be documents of the source."""
    if not isinstance(source, TextFiles):
        return
    top, place = Path(source.name).resolve(), folder.resolve()
    if top not in (place, *place.parents):
        return
    if not any(part.startswith(".") for part in place.relative_to(top).parts):  # hidden ones
        raise ValueError(
            f"{name}: expected a folder outside of {source.name}, whose files are all read, got "
            f"{folder}"
        )


@dataclass(frozen=True)
class Extent:
    """A part of a file, in bytes; its ends move to the next boundary when it is read."""

    path: Path
    begin: int
    end: int
    size: int
    """Bytes of the whole file."""

    def shrunk(self) -> ValueError:
        """The error of a file that ends too early."""
        return ValueError(
            f"source: expected {self.size:,} bytes in {self.path}, which has changed while it is "
            "read"
        )


@dataclass(frozen=True)
class FileBlock:
    """Parts of one or more text files."""

    extents: tuple[Extent, ...]
    file_per_document: bool

    def read(self) -> Iterator[CleanText]:
        """See `Block`."""
        for extent in self.extents:
            with extent.path.open("rb") as file:
                begin, end = (
                    _boundary(file, at, extent.size, not self.file_per_document)
                    for at in (extent.begin, extent.end)
                )
                file.seek(begin)
                text = file.read(end - begin)
            if len(text) != end - begin:
                raise extent.shrunk()
            _check_utf8(text, extent.path, begin)
            if b"\r" in text:
                text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            if begin == 0:
                text = text.removeprefix(_BOM)
            yield clean(text, np.array([len(text)]) if self.file_per_document else None)


@dataclass(frozen=True)
class LineBlock:
    """The lines of JSON that begin in parts of one or more files, a document each."""

    extents: tuple[Extent, ...]
    column: str

    def read(self) -> Iterator[CleanText]:
        """See `Block`."""
        for parts in documents_in_blocks(self._documents(), sys.maxsize, 0):
            yield from parts

    def _documents(self) -> Iterator[str]:
        for extent in self.extents:
            with extent.path.open("rb") as file:
                at = extent.begin
                if at:  # a line that began earlier, if only a line feed before this part
                    file.seek(at - 1)
                    at += len(file.readline(extent.end - at + 1)) - 1
                while at < extent.end:
                    line = file.readline(LONGEST_FILE)
                    if not line:
                        raise extent.shrunk()
                    text = document_of(line, self.column, f"{extent.path}: byte {at:,}")
                    if text:
                        yield text
                    at += len(line)


def _extents(
    paths: Sequence[Path], first: int, most: int | None = None
) -> list[tuple[Extent, ...]]:
    """Divides files into blocks; none of a file is larger than `most` bytes, or else the block."""
    blocks: list[list[Extent]] = [[]]
    room = block_bytes(0, first)
    for path in paths:
        size, begin = path.stat().st_size, 0
        while begin < size:
            if room <= 0:
                room = block_bytes(len(blocks), first)
                blocks.append([])
            end = min(begin + (most or room), size)
            blocks[-1].append(Extent(path, begin, end, size))
            room -= end - begin
            begin = end
    return [tuple(extents) for extents in blocks]


@dataclass(frozen=True)
class RowBlock:
    """Rows `first` to `last` - 1 of a data set, one document each."""

    specification: str
    first: int
    last: int

    def read(self) -> Iterator[CleanText]:
        """See `Block`."""
        source = _data_set(self.specification)
        column = source.load().data.column(source.column)
        for first in range(self.first, self.last, _ROWS):
            texts = column[first : min(first + _ROWS, self.last)].to_pylist()
            yield _clean_all([text.encode() for text in texts if text])


def _row_blocks(source: HuggingFaceSource, first: int) -> list[RowBlock] | None:
    import pyarrow
    import pyarrow.compute

    table = source.load()
    column = table.data.column(source.column)
    text = pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type)
    if not text or table._indices is not None:  # rows in another order than in the table
        return None
    lengths = pyarrow.compute.fill_null(pyarrow.compute.binary_length(column), 0)
    ends = np.cumsum(lengths.to_numpy()[: source.limit], dtype=np.int64)
    blocks: list[RowBlock] = []
    row = size = 0
    while len(ends) and size < ends[-1]:
        enough = size + block_bytes(len(blocks), first)
        last = min(int(np.searchsorted(ends, enough)) + 1, len(ends))
        blocks.append(RowBlock(source.name.removeprefix("hf:"), row, last))
        row, size = last, int(ends[last - 1])
    return blocks


@functools.lru_cache(maxsize=1)
def _data_set(specification: str) -> HuggingFaceSource:
    """Opened once by a worker."""
    return HuggingFaceSource(specification)


def _boundary(file: BinaryIO, at: int, size: int, blank_line_ends: bool) -> int:
    """Where a cut at a byte really is: after the next blank line, or line, or white space.

    Cuts keep their order: a later one never comes before an earlier one.
    """
    if at in (0, size):
        return at
    file.seek(at)
    window = file.read(_WINDOW)
    patterns = (rb"\n[ \t\r\v\f]*\n", rb"\n", rb"[ \t\r\v\f]")
    for pattern in patterns[not blank_line_ends :]:
        if found := re.search(pattern, window):
            return at + found.end()
        if at + len(window) >= size:  # the rest is one document
            return size
    inside = re.match(rb"[\x80-\xbf]{0,3}", window)  # the rest of a character
    assert inside is not None  # it may be empty
    return at + inside.end()


def _check_utf8(text: bytes, path: Path, begin: int) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")()
    for at in range(0, len(text), _WINDOW):
        try:
            decoder.decode(text[at : at + _WINDOW], final=at + _WINDOW >= len(text))
        except UnicodeDecodeError as error:
            raise ValueError(
                f"source: {path} is not UTF-8 text, after byte {begin + at:,}: {error}"
            ) from error


def documents_in_blocks(
    documents: Iterable[str], first: int, number: int
) -> Iterator[list[CleanText]]:
    """Yields the blocks of a source that is read in order, from block `number` on."""
    block: list[CleanText] = []
    pending: list[bytes] = []
    size = pending_size = 0
    for document in documents:
        pending.append(document.encode("utf-8", "replace"))
        pending_size += len(pending[-1])
        full = size + pending_size >= block_bytes(number, first)
        if full or pending_size >= _WINDOW:
            block.append(_clean_all(pending))
            size += pending_size
            pending, pending_size = [], 0
        if full:
            yield block
            number, size, block = number + 1, 0, []
    if pending:
        block.append(_clean_all(pending))
    if block:
        yield block


def _clean_all(texts: list[bytes]) -> CleanText:
    ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
    return clean(b"".join(texts), ends)
