"""Files that are compressed with gzip, bzip2, xz or zstd, known by the ending of their names."""

import bz2
import gzip
import importlib
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from bert_unpad.data.store.manifest import DamagedDataError


def _zstd() -> ModuleType:
    """Python's own module from 3.14 on, before that its backport."""
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            pass
    raise ImportError(
        "zstd files need the package `backports.zstd`: pip install 'bert_unpad[zstd]'"
    )


def _open_zstd(path: Path) -> Any:
    return _zstd().ZstdFile(path)


_OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.GzipFile,
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": _open_zstd,
    ".zstd": _open_zstd,
}
ENDINGS = tuple(_OPENERS)
"""The endings of compressed files, in lower case."""


@contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for reading bytes; decompresses them if its name has one of `ENDINGS`.

    A file may consist of several compressed parts, as parallel tools write it.

    Raises:
        DamagedDataError: the file is cut off, or is not compressed that way. Reading raises it too.
        ImportError: zstd is needed and not installed.
    """
    ending = path.suffix.lower()
    opener = _OPENERS.get(ending, lambda path: path.open("rb"))
    damage: tuple[type[Exception], ...] = (EOFError, OSError, zlib.error, lzma.LZMAError)
    if opener is _open_zstd:
        damage += (_zstd().ZstdError,)
    try:
        with opener(path) as file:
            yield file
    except damage as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the disk
            raise
        raise DamagedDataError(f"{path}: expected a complete {ending} file ({error})") from error
