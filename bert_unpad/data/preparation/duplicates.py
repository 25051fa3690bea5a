"""The second stage: finds documents that came before, a range of digests at a time.

Digests are divided into ranges, each small enough to fit in memory. The digests of a block are
stored in ascending order, so all ranges together read them once. Of documents with the same digest
the first of the corpus stays.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bert_unpad._files import replacing
from bert_unpad.data.preparation.spool import SpooledBlock

_BYTES_PER_DOCUMENT = 128  # digest, number and what sorting takes


def num_ranges(documents: int, memory: int) -> int:
    """The number of ranges of digests that each fit in `memory` bytes."""
    return max(1, -(-documents * _BYTES_PER_DOCUMENT // memory))


def find_duplicates(
    spool: Path, folder: Path, blocks: int, number: int, ranges: int
) -> dict[str, Any]:
    """Writes the places of the documents to leave out, of range `number` of digests."""
    started = time.perf_counter()
    lowest, highest = (int(2**64 * n // ranges) for n in (number, number + 1))
    parts = [np.empty((3, 0), np.uint64)]
    for block in range(blocks):
        parts.append(SpooledBlock(spool, block).digests(lowest, highest))
        parts[-1][2] += _place(block)
    first, second, place = np.concatenate(parts, axis=1)
    order = np.lexsort((second, first))  # stable: equal ones stay in order
    first, second = first[order], second[order]
    again = (first[1:] == first[:-1]) & (second[1:] == second[:-1])
    found = np.sort(place[order[1:][again]])
    path = duplicates_path(folder, number, ranges)
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.save(file, found, allow_pickle=False)
    return {"seconds": {"duplicates": time.perf_counter() - started}}


def duplicates_path(folder: Path, number: int, ranges: int) -> Path:
    """The file of one range."""
    return folder / f"{number:04}-of-{ranges:04}.npy"


def count_duplicates(folder: Path, ranges: int) -> int:
    """The number of documents that are left out."""
    paths = (duplicates_path(folder, number, ranges) for number in range(ranges))
    return sum(len(np.load(path, mmap_mode="r", allow_pickle=False)) for path in paths)


def distinct(folder: Path, ranges: int, number: int, documents: int) -> NDArray[np.bool_]:
    """Which documents of a block have not come before, bool [documents]."""
    kept = np.ones(documents, bool)
    for part in range(ranges):
        path = duplicates_path(folder, part, ranges)
        places = np.load(path, mmap_mode="r", allow_pickle=False)
        first, last = np.searchsorted(places, [_place(number), _place(number + 1)])
        kept[places[first:last] - _place(number)] = False
    return kept


def _place(block: int) -> np.uint64:
    """Stands for a block's first document; places are in the order of the corpus."""
    return np.uint64(block << 32)
