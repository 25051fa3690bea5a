"""The first stage: documents, cleaned, one file a block, with a record of each document.

Later stages read these files, so a corpus is read once, even if it is a stream. The records of a
block appear last and under their final name only when they are complete: a block that has them is
done, whatever was killed.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bert_unpad._files import read_json_object, replacing, write_text
from bert_unpad.data.formats.sources import Source
from bert_unpad.data.preparation.blocks import Block, documents_in_blocks
from bert_unpad.data.store.manifest import DamagedDataError, count_of
from bert_unpad.data.text.sentences import CleanText

logger = logging.getLogger(__name__)

RECORD = np.dtype([("digest", "<u8", 2), ("end", "<i8"), ("sentences", "<i8")])
"""A document: the beginning of its SHA-256, where it ends in the file, how many sentences."""


class SpooledBlock:
    """A block of documents on disk.

    Attributes:
        records: `RECORD` [documents].
        number: as given.
        paths: its files, in the order in which they are written.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self.number = number
        self.text_path = folder / f"{number:06}.txt"
        self.digests_path = folder / f"{number:06}.digests"
        self.records_path = folder / f"{number:06}.npy"
        self.paths = (self.text_path, self.digests_path, self.records_path)
        self._records: NDArray[np.void] | None = None

    @property
    def is_done(self) -> bool:
        return self.records_path.exists()

    @property
    def records(self) -> NDArray[np.void]:
        if self._records is None:
            self._records = np.load(self.records_path, allow_pickle=False)
        return self._records

    @property
    def hashes(self) -> NDArray[np.uint64]:
        """The first number of each document's digest, uint64 [documents]."""
        return self.records["digest"][:, 0]

    def digests(self, lowest: int, highest: int) -> NDArray[np.uint64]:
        """The digests whose first number is `lowest` or more and less than `highest`.

        Reads no others: they are stored in ascending order.

        Returns:
            uint64 [3, documents]: both numbers of a digest, and which document of the block it is;
            equal digests in the order of the documents.
        """
        found = np.load(self.digests_path, mmap_mode="r", allow_pickle=False)
        hashes = found[0]
        first = np.searchsorted(hashes, np.uint64(lowest))
        last = len(hashes) if highest == 2**64 else np.searchsorted(hashes, np.uint64(highest))
        return np.array(found[:, first:last])

    @property
    def size(self) -> int:
        """Bytes of all documents."""
        return int(self.records["end"][-1]) if len(self.records) else 0

    def size_of(self, which: NDArray[np.bool_]) -> int:
        """Bytes of the documents for which `which` (bool [documents]) is True."""
        return int(np.diff(self.records["end"], prepend=0)[which].sum())

    def read(self, which: NDArray[np.bool_]) -> Iterator[list[str]]:
        """Yields the sentences of each document for which `which` (bool [documents]) is True."""
        ends = self.records["end"]
        begins = np.concatenate([[0], ends[:-1]])
        with self.text_path.open("rb") as file:
            for begin, end in zip(begins[which].tolist(), ends[which].tolist(), strict=True):
                file.seek(begin)
                text = file.read(end - begin)
                if len(text) != end - begin:
                    raise DamagedDataError(
                        f"{self.text_path}: expected {self.size:,} bytes, got "
                        f"{self.text_path.stat().st_size:,}; prepare again in a new folder"
                    )
                yield text.decode().split("\n")[:-1]

    def write(self, parts: Iterable[CleanText]) -> dict[str, Any]:
        """Writes the block.

        Returns:
            What was done: `documents`, `bytes` of cleaned text, and `seconds`.
        """
        started = time.perf_counter()
        records, size = [np.empty(0, RECORD)], 0
        with replacing(self.text_path) as temporary, temporary.open("wb") as file:
            for part in parts:
                of_part = np.empty(len(part.ends), RECORD)
                of_part["digest"] = part.digests()
                of_part["end"] = part.ends + size
                of_part["sentences"] = part.sentences
                records.append(of_part)
                file.write(part.text)
                size += len(part.text)
        self._records = np.concatenate(records)
        first, second = self._records["digest"].T
        order = np.lexsort((second, first))  # stable: equal ones stay in order
        _save(self.digests_path, np.stack([first[order], second[order], order.astype(np.uint64)]))
        _save(self.records_path, self._records)
        return {
            "documents": len(self._records),
            "bytes": size,
            "seconds": {"read": time.perf_counter() - started},
        }


def _save(path: Path, array: NDArray) -> None:
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.save(file, array, allow_pickle=False)


def spool_block(folder: Path, number: int, block: Block) -> dict[str, Any]:
    """Reads a block that any worker can read; see `SpooledBlock.write`."""
    return SpooledBlock(folder, number).write(block.read())


def spool_in_order(
    folder: Path, source: Source, first: int, done: Callable[[dict[str, Any]], object]
) -> int:
    """Reads a source from its beginning, or goes on where an earlier call was killed.

    A source that has a position (`HuggingFaceSource`) goes on there; what another one has yielded
    before is read again and dropped. `done` is called with what `SpooledBlock.write` returns.

    Returns:
        The number of blocks.
    """
    path = folder / "position.json"
    state = _saved(path)
    if state["blocks"]:
        logger.info("continuing after %d documents of an interrupted run", state["documents"])
    number = state["blocks"]
    reader = _Reader(source, state)
    for parts in documents_in_blocks(reader.documents(), first, number):
        done(SpooledBlock(folder, number).write(parts))
        number += 1
        write_text(path, json.dumps({**reader.state, "blocks": number}))
    return number


class _Reader:
    """Reads a source on from a saved state, and keeps the state of its own progress."""

    def __init__(self, source: Source, state: dict[str, Any]) -> None:
        self._source = source
        self.state = dict(state)

    def documents(self) -> Iterator[str]:
        position, number = self.state["position"], self.state["position_documents"]
        skipped = self.state["documents"] - number
        arguments = () if position is None else (position,)
        previous = getattr(self._source, "position", None)
        for text in self._source.documents(*arguments):
            position = getattr(self._source, "position", None)
            if position is not previous:  # a new position is that of this document
                previous = position
                self.state |= {"position": position, "position_documents": number}
            number += 1
            if skipped > 0:
                skipped -= 1
                continue
            self.state["documents"] = number
            yield text


def _saved(path: Path) -> dict[str, Any]:
    """What was saved, or the state at the beginning if that is missing or damaged."""
    counts = ("blocks", "documents", "position_documents")
    beginning = {**dict.fromkeys(counts, 0), "position": None}
    try:
        state = read_json_object(path)
        found = {name: count_of(state, name, sys.maxsize) for name in counts}
        return {**found, "position": state["position"]}
    except FileNotFoundError:
        return beginning
    except (KeyError, ValueError) as error:
        logger.warning("reading again: %s is damaged (%s)", path, error)
        os.unlink(path)
        return beginning
