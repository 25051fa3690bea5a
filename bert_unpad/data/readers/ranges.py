"""Reads ranges of bytes of many files at random.

Only a bounded number of files stay open, so thousands of files do not exceed a process's limit of
open files. All ranges of a call are announced to the kernel before the first is read, so a slow
disk reads them side by side. The ranks of a machine share what is read through the page cache, as
with memory maps; but a file that has become shorter is an error here, where a map would end the
process.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bert_unpad.data.store.manifest import DamagedDataError

_MOST_OPEN = 256  # files of all readers, of 1,024 that a process may have open
_readers: weakref.WeakSet[object] = weakref.WeakSet()


def may_keep_open(reader: object, most: int) -> int:
    """How many files a reader may keep open: fewer with more readers, as a mixture has them.

    Args:
        reader: asks when it is made and before it opens a file.
        most: largest number for one reader.
    """
    _readers.add(reader)
    return max(1, min(most, _MOST_OPEN // len(_readers)))


class FileRanges:
    """Some files to read from; any thread may.

    Args:
        paths: the files.
        max_open: largest number of open files.
    """

    def __init__(self, paths: Sequence[Path], max_open: int = 64) -> None:
        self._paths = paths
        self._max_open = max_open
        self._open: OrderedDict[int, int] = OrderedDict()
        self._lock = threading.Lock()  # one thread must not close a file while another reads it
        weakref.finalize(self, _close_all, self._open)
        may_keep_open(self, max_open)

    def read(
        self, files: NDArray[np.int64], begins: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> list[bytes]:
        """Reads B ranges.

        Args:
            files: int64 [B], number of the file of each range.
            begins: int64 [B], its first byte.
            sizes: int64 [B], its number of bytes.

        Raises:
            DamagedDataError: a file is missing or shorter than a range; the message names it.
        """
        order = np.lexsort((begins, files))
        ranges = [column[order].tolist() for column in (files, begins, sizes)]
        found = [b""] * len(order)
        with self._lock:
            for file, begin, size in zip(*ranges, strict=True):
                os.posix_fadvise(self._handle(file), begin, size, os.POSIX_FADV_WILLNEED)
            for place, file, begin, size in zip(order.tolist(), *ranges, strict=True):
                data = found[place] = os.pread(self._handle(file), size, begin)
                if len(data) != size:
                    raise DamagedDataError(
                        f"{self._paths[file]} has become shorter: expected {size:,} bytes at "
                        f"{begin:,}, got {len(data):,}"
                    )
        return found

    def _handle(self, number: int) -> int:
        handle = self._open.get(number)
        if handle is not None:
            self._open.move_to_end(number)
            return handle
        while len(self._open) >= may_keep_open(self, self._max_open):
            os.close(self._open.popitem(last=False)[1])
        try:
            handle = self._open[number] = os.open(self._paths[number], os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DamagedDataError(f"{self._paths[number]} cannot be read ({error})") from error
        return handle

    def close(self) -> None:
        """Closes all files; reading later opens them again."""
        with self._lock:
            _close_all(self._open)


def _close_all(handles: OrderedDict[int, int]) -> None:
    while handles:
        os.close(handles.popitem()[1])
