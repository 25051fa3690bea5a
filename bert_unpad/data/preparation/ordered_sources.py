"""Sources that have to be read in order: each by one worker, into blocks of its own.

Compressed files and XML cannot be cut anywhere, so such files are divided into runs of neighbours,
each an ordered source. The blocks of a source are numbered when all sources have been read, those
of the first source first.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bert_unpad._files import read_json_object, write_text
from bert_unpad.data.formats.sources import Source, TextFiles
from bert_unpad.data.preparation.blocks import block_bytes
from bert_unpad.data.preparation.spool import SpooledBlock, spool_in_order

_DONE = "done.json"


def divide(source: Source, first: int) -> list[Source]:
    """Divides a source that is read in order into several: files into runs of neighbours."""
    if not isinstance(source, TextFiles):
        return [source]
    parts: list[Source] = []
    files: list[tuple[Path, str]] = []
    size = 0
    for number, (path, kind) in enumerate(source.files, 1):
        files.append((path, kind))
        size += path.stat().st_size
        if size >= block_bytes(len(parts), first) or number == len(source.files):
            parts.append(source.part(files))
            files, size = [], 0
    return parts


class OrderedSources:
    """The ordered sources of a corpus, on disk."""

    def __init__(self, work: Path) -> None:
        self._folder = work / "sources"

    def begin(self, count: int) -> None:
        """Says how many sources there are.

        Raises:
            ValueError: it was another number before.
        """
        self._folder.mkdir(exist_ok=True)
        path = self._folder / "count.json"
        if path.exists() and (found := read_json_object(path)["sources"]) != count:
            raise ValueError(f"tasks: expected {found}, as this preparation was begun, got {count}")
        write_text(path, json.dumps({"sources": count}))

    def of(self, number: int) -> Path:
        """The folder of a source."""
        return self._folder / f"{number:05}"

    def is_done(self, number: int) -> bool:
        """Whether a source has been read to its end."""
        return (self.of(number) / _DONE).exists()

    def missing(self) -> list[int] | None:
        """The sources that are still to be read; None if their number is not known."""
        path = self._folder / "count.json"
        if not path.exists():
            return None
        count = read_json_object(path)["sources"]
        return [number for number in range(count) if not self.is_done(number)]

    def number_blocks(self, spool: Path) -> int:
        """Moves the blocks of all sources, once read, to one folder; returns their number.

        Several processes may do so at once, and one may be killed.
        """
        number = 0
        for one in range(read_json_object(self._folder / "count.json")["sources"]):
            folder = self.of(one)
            for own in range(read_json_object(folder / _DONE)["blocks"]):
                block, target = SpooledBlock(folder, own), SpooledBlock(spool, number)
                for old, new in zip(block.paths, target.paths, strict=True):
                    _move(old, new)
                number += 1
        return number


def spool_source(
    folder: Path,
    source: Source,
    first: int,
    done: Callable[[dict[str, Any]], object] = lambda result: None,
) -> dict[str, Any]:
    """Reads an ordered source to its end, or goes on where an earlier call was killed.

    Returns:
        What was done: `documents`, `bytes` of cleaned text, and `seconds`.
    """
    total: dict[str, Any] = {"documents": 0, "bytes": 0, "seconds": {"read": 0.0}}

    def add(result: dict[str, Any]) -> None:
        total["documents"] += result["documents"]
        total["bytes"] += result["bytes"]
        total["seconds"]["read"] += result["seconds"]["read"]
        done(result)

    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / _DONE).exists():
        blocks = spool_in_order(folder, source, first, add)
        write_text(folder / _DONE, json.dumps({"blocks": blocks}))
    return total


def _move(source: Path, target: Path) -> None:
    try:
        source.rename(target)
    except FileNotFoundError:
        if not target.exists():
            raise
