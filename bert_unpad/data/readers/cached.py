"""What is made of files once, such as an index, and kept in the cache folder.

The key is a digest of the files' names, sizes and times of change, so a changed file is looked at
again. A folder is made under a temporary name and renamed when complete.
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

from bert_unpad.data.store.cache import cache_lock
from bert_unpad.data.store.manifest import DamagedDataError

logger = logging.getLogger(__name__)

MAX_MAPS = 256
"""Files that are memory-mapped for good: each stays open, of 1,024 that a process may have open."""

Loaded = TypeVar("Loaded")
Item = TypeVar("Item")
Made = TypeVar("Made")
_DAMAGE = (OSError, EOFError, ValueError, DamagedDataError)


def cached(
    cache_dir: Path,
    kind: str,
    files: Sequence[Path],
    settings: Sequence[Any],
    write: Callable[[Path], None],
    load: Callable[[Path], Loaded],
    shared: Callable[[], object] = lambda: None,
) -> Loaded:
    """Loads a folder of the cache; makes it first if it is missing or damaged.

    Many processes can call this at once: one makes it, the others wait.

    Args:
        cache_dir: the cache.
        kind: name of the folder of its kind, with a version.
        files: what it is made of.
        settings: JSON values that it depends on besides.
        write: fills a new folder.
        load: returns what the folder holds; an OSError, EOFError, ValueError or DamagedDataError
            says that it is damaged.
        shared: called before, where the folder has to be made: work of which several processes can
            each do a part.
    """
    states = [(str(file.resolve()), file.stat()) for file in files]
    about = [[name, state.st_size, state.st_mtime_ns] for name, state in states]
    key = hashlib.sha256(json.dumps([kind, *settings, about]).encode()).hexdigest()[:32]
    path = cache_dir / kind / key
    if path.is_dir():
        try:
            return load(path)
        except _DAMAGE:
            pass  # the process that gets the lock first looks again, and reports it
    else:
        shared()
    with cache_lock(cache_dir / "locks" / f"{key}.lock"):
        if path.is_dir():
            try:
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
            write(temporary)
            os.replace(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return load(path)


def in_any_order(
    make: Callable[[Item], Made], items: Sequence[Item], title: str, progress: bool | None
) -> list[Made]:
    """Calls a function for each item, in an order of this process; returns the results in theirs.

    Ranks that start at once so share the work on what is `cached`, item by item.

    Args:
        make: called with an item.
        items: such as files.
        title: of a bar.
        progress: whether to show it; None shows it if stderr is a terminal.
    """
    order = np.random.default_rng(os.getpid()).permutation(len(items)).tolist()
    disable = None if progress is None else not progress
    bar = tqdm(order, desc=title, unit=" files", disable=disable, leave=False)
    made = {at: make(items[at]) for at in bar}
    return [made[at] for at in range(len(items))]


def save_arrays(folder: Path, **arrays: NDArray) -> None:
    """Writes arrays as NAME.npy."""
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array, allow_pickle=False)


def load_array(folder: Path, name: str, dtype: type, mapped: bool = True) -> NDArray:
    """Opens an array [N] that `save_arrays` wrote.

    Args:
        folder: where it is.
        name: its name.
        dtype: its type.
        mapped: map it instead of reading it.

    Raises:
        OSError, EOFError, ValueError: it is missing, cut off, or another array.
    """
    mode = "r" if mapped else None
    array = np.load(folder / f"{name}.npy", mmap_mode=mode, allow_pickle=False)
    if array.ndim != 1 or array.dtype != dtype:
        raise ValueError(f"{name}: {array.dtype} {list(array.shape)}")
    return array.view(np.ndarray)
