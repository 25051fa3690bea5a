"""The lengths of all examples of many files, computed once and cached.

Balancing an epoch needs every length, and reading them from thousands of files takes minutes. The
cache key is a digest of the files' names, sizes and times of change, so a changed or truncated file
is checked again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from bert_unpad._files import replacing
from bert_unpad.data.hdf5.layout import index_file
from bert_unpad.data.store.cache import cache_lock

logger = logging.getLogger(__name__)

# What numpy and zipfile raise of a damaged archive.
_DAMAGE = (
    *(OSError, EOFError, LookupError, ValueError, TypeError, MemoryError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error, struct.error),
)


def length_index(
    files: Sequence[Path], max_seq_length: int, cache_dir: Path, progress: bool | None = None
) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
    """Returns the lengths of all examples, file after file, from the cache if possible.

    Many processes can call this at once: one reads the files, the others wait.

    Args:
        files: the files to index.
        max_seq_length: longest allowed example, in tokens.
        cache_dir: folder of the cached index.
        progress: whether to show a bar; None shows it if stderr is a terminal.

    Returns:
        Lengths, uint16 [N], and where the examples of each file begin, int64 [files + 1].

    Raises:
        DamagedDataError: a file is wrong; the message names it and what was expected.
    """
    states = [(str(file.resolve()), file.stat()) for file in files]
    about = [[name, state.st_size, state.st_mtime_ns] for name, state in states]
    text = json.dumps(["hdf5 index, version 1", max_seq_length, about])
    key = hashlib.sha256(text.encode()).hexdigest()[:32]
    path = cache_dir / "hdf5" / f"{key}.npz"
    found = _load(path, len(files))
    if found is not None:
        return found
    with cache_lock(cache_dir / "locks" / f"{key}.lock"):
        found = _load(path, len(files))
        if found is not None:
            return found
        disable = None if progress is None else not progress
        parts = [
            index_file(file, max_seq_length)
            for file in tqdm(files, desc="indexing", unit=" files", disable=disable, leave=False)
        ]
        lengths = np.concatenate(parts)
        begins = np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.savez(file, lengths=lengths, begins=begins)
        logger.info("indexed %d files, %d examples", len(files), len(lengths))
    return lengths, begins


def _load(path: Path, files: int) -> tuple[NDArray[np.uint16], NDArray[np.int64]] | None:
    if not path.exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as stored:  # a zip archive: reading checks its CRC
            lengths, begins = stored["lengths"], stored["begins"]
        if (
            (lengths.dtype, begins.dtype) != (np.uint16, np.int64)
            or (lengths.ndim, begins.shape) != (1, (files + 1,))
            or (begins[0], begins[-1]) != (0, len(lengths))
            or (np.diff(begins) < 0).any()
        ):
            raise ValueError("it does not fit the files")
    except _DAMAGE as error:
        logger.warning("indexing again, as %s is damaged (%s)", path, error)
        return None
    return lengths, begins
