"""Locks on files, which the kernel releases when their process ends in any way."""

import errno
import fcntl
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

logger = logging.getLogger(__name__)

LOCK = "lock"
"""The file in `work` that is locked; there from the beginning until the folder is complete."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)  # of file systems that have none


@contextmanager
def cache_lock(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on a file; waits while another process holds it.

    The file is created if it is missing, and stays: deleting it would let two processes lock two
    files with the same name.

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
            if error.errno not in _NO_LOCKS:
                raise
            raise OSError(
                error.errno,
                f"cache_dir: expected a file system with flock() locks at {path.parent}",
            ) from error
        yield  # closing the file releases the lock


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Lets processes do something one after the other that all may do with the same result.

    Where the file system has no locks, they do it at once.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            stack.enter_context(cache_lock(path))
        yield


@contextmanager
def build_lock(work: Path, *, alone: bool) -> Iterator[None]:
    """Keeps a folder of intermediate files to this process, or to parts of one preparation.

    Raises:
        BlockingIOError: another process is at work there, or has just completed or removed it.
    """
    path = work / LOCK
    gone = BlockingIOError(
        f"output: expected unfinished work in {work.parent}, but another process has just "
        "completed or removed it"
    )
    try:
        file = path.open("r+")
    except FileNotFoundError as error:
        raise gone from error
    with file:
        try:
            fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(
                f"output: expected no other process at work in {work.parent}, got one; wait until "
                "it has ended (only parts of a preparation, --part, work side by side)"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            logger.warning(
                "%s: the file system has no flock() locks; start no other process for this folder "
                "until this one has ended, except parts",
                work.parent,
            )
        if not path.exists():
            raise gone
        yield
