"""The cache folder and the lock that lets one of many processes fill it while the others wait."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bert_unpad.data.store.manifest import DamagedDataError

logger = logging.getLogger(__name__)

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
"""Errors of file systems that have no locks."""
_DAMAGED = "damaged"  # a file in a folder of the cache


def default_cache_dir() -> Path:
    """Returns `$XDG_CACHE_HOME/bert_unpad`, by default `~/.cache/bert_unpad`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bert_unpad"


def chosen_cache_dir(given: str | Path | None) -> Path:
    """Returns the folder that a setting `cache_dir` names; None: the default."""
    return Path(given).expanduser() if given else default_cache_dir()


def note_damage(cache: Path, error: BaseException) -> bool:
    """Marks what an error of reading names in a cache, so that it is made again when next opened.

    Returns:
        Whether the error names a folder of the cache, and that could be marked.
    """
    found = re.search(rf"{re.escape(str(cache))}/[\w-]+/[0-9a-f]{{32}}(?=/)", str(error))
    with suppress(OSError):
        if found is not None:
            (Path(found[0]) / _DAMAGED).touch()
            return True
    return False


def check_not_noted(folder: Path) -> None:
    """Raises a DamagedDataError if `note_damage` has marked a folder of the cache."""
    if (folder / _DAMAGED).exists():
        raise DamagedDataError(f"{folder} is damaged: reading it has failed")


@contextmanager
def cache_lock(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on a file; waits while another process holds it.

    The file is created if it is missing. The kernel releases the lock when its process ends in any
    way, so a killed run never blocks the next one. The file stays: deleting it would let two
    processes lock two files with the same name.

    Raises:
        OSError: the file system has no locks; the message names the folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.info("waiting for another process that prepares this data (%s)", path)
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            raise OSError(
                error.errno,
                f"cache_dir: expected a file system with flock() locks at {path.parent}",
            ) from error
        yield  # closing the file releases the lock
