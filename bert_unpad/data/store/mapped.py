"""Maps files without keeping them open: a large corpus has more of them than a process may open.

`mmap.mmap`, which `numpy.memmap` uses, keeps a descriptor for each map (from Python 3.13 on it need
not), and a process may have 1,024 descriptors where nothing else is said.

Reading what a file that was cut off no longer has ends a process by SIGBUS, without a word. So
`check_mapped` looks at its size just before each batch is read: some microseconds a file.
"""

import ctypes
import mmap
import os
import weakref
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bert_unpad.data.store.manifest import DamagedDataError

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


class _Mapped(NamedTuple):
    path: Path
    place: tuple[int, int]  # the file itself, whatever `path` names later
    size: int


_mapped: dict[int, _Mapped] = {}  # by address


def map_file(path: Path, dtype: np.dtype, count: int) -> NDArray:
    """Maps the first `count` values of a file for reading; see `check_mapped` on its size.

    Returns:
        [count], read-only. The file is unmapped when no array shows any of it.
    """
    size = count * dtype.itemsize
    if not size:  # nothing cannot be mapped
        return np.empty(0, dtype)
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file, 0)
        state = os.fstat(file)
    finally:
        os.close(file)
    if address == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), str(path))
    _mapped[address] = _Mapped(path, (state.st_dev, state.st_ino), size)
    data = (ctypes.c_char * size).from_address(address)
    # Not at exit, when other threads may still read.
    weakref.finalize(data, _unmap, address, size).atexit = False
    array = np.frombuffer(data, dtype)  # type: ignore[call-overload]
    array.flags.writeable = False
    return array


def _unmap(address: int, size: int) -> None:
    del _mapped[address]  # first, as another file may come to the same address
    _libc.munmap(address, size)


def check_mapped(*arrays: NDArray) -> None:
    """Checks that files still have the size that they had when they were mapped.

    Raises:
        DamagedDataError: one has become shorter; the message names it.
    """
    for array in arrays:
        while isinstance(array.base, np.ndarray):
            array = array.base
        found = _mapped.get(array.__array_interface__["data"][0])
        if found is None:
            continue
        try:
            state = os.stat(found.path)
        except OSError:  # deleted, say: what is mapped stays
            continue
        if (state.st_dev, state.st_ino) == found.place and state.st_size < found.size:
            raise DamagedDataError(
                f"{found.path} has become shorter: expected {found.size:,} bytes, got "
                f"{state.st_size:,}"
            )
