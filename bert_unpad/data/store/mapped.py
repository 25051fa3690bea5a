"""Maps files without keeping them open: a large corpus has more of them than a process may open.

`mmap.mmap`, which `numpy.memmap` uses, keeps a descriptor for each map (from Python 3.13 on it need
not), and a process may have 1,024 descriptors where nothing else is said.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


def map_file(path: Path, dtype: np.dtype, count: int) -> NDArray:
    """Maps a file for reading.

    Args:
        path: the file; it has to keep its size while it is mapped.
        dtype: of its values.
        count: how many values it has; no more bytes than that are mapped.

    Returns:
        [count], read-only. The file is unmapped when no array shows any of it.

    Raises:
        OSError: the file cannot be opened or mapped.
    """
    size = count * dtype.itemsize
    if not size:  # nothing cannot be mapped
        return np.empty(0, dtype)
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file, 0)
    finally:
        os.close(file)
    if address == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), str(path))
    data = (ctypes.c_char * size).from_address(address)
    # Not at exit, when other threads may still read.
    weakref.finalize(data, _libc.munmap, address, size).atexit = False
    array = np.frombuffer(data, dtype)
    array.flags.writeable = False
    return array
