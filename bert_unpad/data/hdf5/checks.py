"""Opens HDF5 files and datasets, but only complete datasets with all values in the file itself.

HDF5 can keep the values of a dataset in another file: through a link, as raw data, or combined from
several files. With that, a data file could make training read any other file, so all three are
errors before anything is opened. A dataset can also declare huge numbers of values that were never
written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from bert_unpad.data.store.manifest import DamagedDataError

_MAX_CHUNK = 2**28  # bytes; the whole of a chunk is in memory to read a row of it

# What h5py raises of a damaged file: it chooses one of these by the number of HDF5's error.
_DAMAGE = (OSError, RuntimeError, LookupError, ValueError, TypeError, MemoryError)


def open_file(path: Path) -> h5py.File:
    """Opens a file for reading.

    Raises:
        DamagedDataError: it is missing, truncated or not an HDF5 file; the message names it.
    """
    try:
        return h5py.File(path, "r")
    except _DAMAGE as error:
        raise DamagedDataError(f"{path}: expected a complete HDF5 file ({error})") from error


def has_dataset(file: h5py.File, name: str) -> bool:
    """Whether the file has an entry of this name; `open_dataset` checks what it is."""
    with _named(file, name):
        return bool(file.id.links.exists(name.encode()))


def open_dataset(file: h5py.File, name: str) -> h5py.Dataset:
    """Opens a dataset at the top level of a file.

    Raises:
        DamagedDataError: it is not a dataset, is damaged or incomplete, or its values are in
            another file; the message names it.
    """
    with _named(file, name):
        # h5py's own `in` and `get` would follow a link, and so open the file that it names.
        if file.id.links.get_info(name.encode()).type != h5py.h5l.TYPE_HARD:
            raise _fail(file, name, "expected a dataset of this file, got a link")
        data = file[name]
        if not isinstance(data, h5py.Dataset):
            raise _fail(file, name, f"expected a dataset, got a {type(data).__name__.lower()}")
        if data.is_virtual or data.external:
            raise _fail(file, name, "expected values in this file, got the name of another file")
        if data.shape is None:
            raise _fail(file, name, "expected values, got none")
        if data.chunks is None:
            whole = data.id.get_storage_size() >= data.size * data.dtype.itemsize
        else:
            if math.prod(data.chunks) * data.dtype.itemsize > _MAX_CHUNK:
                raise _fail(file, name, f"expected chunks of at most {_MAX_CHUNK:,} bytes")
            sizes = zip(data.shape, data.chunks, strict=True)
            whole = data.id.get_num_chunks() == math.prod(-(-size // part) for size, part in sizes)
        if not whole:
            raise _fail(file, name, f"{data.shape} values are declared, but not all were written")
        return data


def read_dataset(file: h5py.File, name: str, rows: NDArray[np.int64] | slice) -> NDArray:
    """Reads some rows of a dataset from `open_dataset`.

    Raises:
        DamagedDataError: the rows cannot be read.
    """
    with _named(file, name):
        return file[name][rows]


def _fail(file: h5py.File, name: str, message: str) -> DamagedDataError:
    return DamagedDataError(f"{file.filename}: {name}: {message}")


@contextmanager
def _named(file: h5py.File, name: str) -> Iterator[None]:
    try:
        yield
    except DamagedDataError:
        raise
    except _DAMAGE as error:
        raise DamagedDataError(f"{file.filename}: {name} cannot be read ({error})") from error
