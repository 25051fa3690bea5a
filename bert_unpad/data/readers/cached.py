"""What is made of files once, such as an index, and kept in the cache folder.

The key is a digest of the files' names, sizes and times of change, so a changed file is looked at
again. A folder is made under a temporary name and renamed when complete. Folders that are made of
large files are made by several processes, each by one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from bert_unpad._files import sync_file
from bert_unpad._full_disk import named_if_full
from bert_unpad.data.building.engines import Processes, available_cores
from bert_unpad.data.store.cache import cache_lock, check_not_noted
from bert_unpad.data.store.manifest import DamagedDataError
from bert_unpad.data.store.mapped import map_file

logger = logging.getLogger(__name__)

Loaded = TypeVar("Loaded")
_LARGE = 2**28  # bytes of files from which starting processes, 3 seconds, pays
_MOST_WORKERS = 32  # of half a GB each; more would wait for the disk
# Not other OSErrors: too many open files, or a disk that is away for a moment, is no damage.
_DAMAGE = (FileNotFoundError, EOFError, ValueError, DamagedDataError)


def cached(
    cache_dir: Path,
    kind: str,
    files: Sequence[Path],
    settings: Sequence[Any],
    write: Callable[[Path], None],
    load: Callable[[Path], Loaded],
) -> Loaded:
    """Loads a folder of the cache; makes it first if it is missing or damaged.

    Many processes can call this at once: one makes it, the others wait.

    Args:
        cache_dir: the cache.
        kind: name of the folder of its kind, with a version.
        files: what it is made of.
        settings: JSON values that it depends on besides.
        write: fills a new folder.
        load: returns what the folder holds; a FileNotFoundError, EOFError, ValueError or
            DamagedDataError says that it is damaged.
    """
    path = _folder(cache_dir, kind, files, settings)
    key = path.name
    if path.is_dir():
        try:
            check_not_noted(path)
            return load(path)
        except _DAMAGE:
            pass  # the process that gets the lock first looks again, and reports it
    with cache_lock(cache_dir / "locks" / f"{key}.lock"):
        if path.is_dir():
            try:
                check_not_noted(path)
                return load(path)
            except _DAMAGE as error:
                logger.warning("making %s again, which is damaged (%s)", path, error)
                aside = path.with_name(f".{key}.{uuid.uuid4().hex}")
                os.replace(path, aside)  # processes that have it open keep its files
                shutil.rmtree(aside)
        path.parent.mkdir(parents=True, exist_ok=True)
        for old in path.parent.glob(f".{key}.*"):  # of processes that were killed
            shutil.rmtree(old, ignore_errors=True)
        temporary = path.with_name(f".{key}.{uuid.uuid4().hex}")
        temporary.mkdir()
        try:
            with named_if_full(path):
                write(temporary)
            for file in temporary.iterdir():  # as `load` may look at sizes only
                sync_file(file)
            os.replace(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return load(path)


def cached_each(entries: Sequence[tuple], title: str, progress: bool | None = None) -> list[Any]:
    """Loads many folders of the cache; makes those that are missing, in processes if that pays.

    Args:
        entries: arguments of `cached`, which have to be picklable.
        title: of a bar.
        progress: whether to show it; None shows it if stderr is a terminal.

    Raises:
        Exception: what the first `write` that has failed raised.
        RuntimeError: a process was killed.
    """
    disable = None if progress is None else not progress
    missing = [entry for entry in entries if not _folder(*entry[:4]).is_dir()]
    size = sum(file.stat().st_size for entry in missing for file in entry[2])
    workers = min(available_cores(), len(missing), _MOST_WORKERS)
    if workers > 1 and size >= _LARGE:
        with Processes(workers) as engine:
            done = engine.run(_make, missing)
            for _ in tqdm(done, title, len(missing), unit=" files", disable=disable, leave=False):
                pass
    bar = tqdm(entries, title, unit=" files", disable=disable, leave=False)
    return [cached(*entry) for entry in bar]


def _make(*entry: Any) -> dict[str, Any]:
    cached(*entry)
    return {}


def _folder(cache_dir: Path, kind: str, files: Sequence[Path], settings: Sequence[Any]) -> Path:
    states = [(str(file.resolve()), file.stat()) for file in files]
    about = [[name, state.st_size, state.st_mtime_ns] for name, state in states]
    key = hashlib.sha256(json.dumps([kind, *settings, about]).encode()).hexdigest()[:32]
    return cache_dir / kind / key


def save_arrays(folder: Path, **arrays: NDArray) -> None:
    """Writes arrays as NAME.npy."""
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array, allow_pickle=False)


def load_array(folder: Path, name: str, dtype: type | np.dtype, mapped: bool = True) -> NDArray:
    """Opens an array [N] that `save_arrays` wrote.

    Args:
        folder: where it is.
        name: its name.
        dtype: its type.
        mapped: map it, which keeps no file open, instead of reading it.

    Raises:
        OSError, ValueError: it is missing, cut off, or another array.
    """
    path, dtype = folder / f"{name}.npy", np.dtype(dtype)
    with path.open("rb") as file:
        version = np.lib.format.read_magic(file)
        if version != (1, 0):  # that of all arrays without names of fields
            raise ValueError(f"{name}: version {version}")
        shape, _, found = np.lib.format.read_array_header_1_0(file)
        begin, size = file.tell(), os.fstat(file.fileno()).st_size
    if len(shape) != 1 or found != dtype or size != begin + shape[0] * dtype.itemsize:
        raise ValueError(f"{name}: {found} {list(shape)} in {size:,} bytes")
    if not mapped:
        return np.fromfile(path, dtype, offset=begin)
    return map_file(path, np.dtype(np.uint8), size)[begin:].view(dtype)
