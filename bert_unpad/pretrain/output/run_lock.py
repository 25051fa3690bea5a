"""One run at a time in a folder, also on file systems that several hosts share.

Rank 0 holds the file `.lock` in the run's folder, which says who it is. Two signs tell whether the
owner is alive. The kernel drops the owner's flock when its process ends, however it ends, so on one
host a killed run never blocks the next one. Other hosts may not see that flock, so the owner also
touches the file every few seconds: an owner on another host counts as dead when the file's time
does not change while this process looks, for two minutes. Clocks may be wrong, so the time itself
proves nothing; a file that looks older than that is only watched for less long.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bert_unpad._files import read_regular, set_aside
from bert_unpad.pretrain.config import ConfigError, PretrainConfig
from bert_unpad.pretrain.ranks import Ranks

logger = logging.getLogger(__name__)

_NAME = ".lock"
# Seconds. Servers drop the flocks of a dead host within 90.
_TOUCH_EVERY, _DEAD_AFTER, _LOOK_EVERY = 10.0, 120.0, 1.0
_DEAD_IF_OLD_AFTER = 2.5 * _TOUCH_EVERY
_NO_FLOCK = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
_held: weakref.WeakSet[_FolderLock] = weakref.WeakSet()


class _FolderLock:
    """The lock of one folder.

    Args:
        key: the setting that names the folder.
        folder: made if missing.
    """

    def __init__(self, key: str, folder: Path) -> None:
        self._key = key
        self._folder = folder
        self._path = folder / _NAME
        self._first_look: tuple[float, float] | None = None  # the file's time, and when that was
        self._made_folder = False
        self._handle = -1
        self._owner: dict[str, Any] = {}

    def take(self) -> None:
        """Takes the lock, after waiting until it is certain that its last owner is dead.

        Raises:
            ConfigError: another run has the lock, or may have it.
        """
        self._made_folder = self._made_folder or not self._folder.exists()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._first_look = None
        while not self._try():
            time.sleep(_LOOK_EVERY)
        if self._first_look is not None:
            # Another host may have come to the same conclusion at the same time.
            time.sleep(2 * _LOOK_EVERY)
            if (owner := _read(self._path)) != self._owner:
                self.drop()
                raise self._refusal(owner)

    def _try(self) -> bool:
        """Takes the lock; False if it is not certain yet whether its last owner is dead."""
        with contextlib.ExitStack() as undo:
            handle, new = _open(self._path)
            undo.callback(os.close, handle)
            flocked = _flock(handle, wait=new)
            if not (new or self._is_free(handle, flocked)):
                return False
            self._owner = _this_machine() | {
                "pid": os.getpid(),
                "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            }
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps(self._owner).encode(), 0)
            undo.pop_all()
        self._handle = handle
        _held.add(self)
        return True

    def _is_free(self, handle: int, flocked: bool | None) -> bool:
        """Whether the last owner is dead; False if that is not certain yet."""
        owner = _read(self._path)
        if not _is_at(handle, self._path):
            return False  # its owner has just deleted it
        here = owner is not None and owner.items() >= _this_machine().items()
        if here and flocked:
            logger.info("taking over %s from %s, which is gone", self._path, _who(owner))
            return True
        touched, now = os.fstat(handle).st_mtime, time.monotonic()
        old = _now(self._folder) - touched > _DEAD_AFTER
        patience = _DEAD_IF_OLD_AFTER if old else _DEAD_AFTER
        first, since = self._first_look or (touched, now)
        dead = now - since > patience
        if touched != first or (flocked is False and (here or dead)):
            raise self._refusal(owner)
        if dead:
            message = "taking over %s from %s, not heard of for %.0f s"
            logger.info(message, self._path, _who(owner), patience)
        elif self._first_look is None:
            logger.info(
                "waiting up to %.0f s to see whether %s still uses %s; if it is dead for certain, "
                "delete %s",
                *(patience, _who(owner), self._folder, self._path),
            )
        self._first_look = first, since
        return dead

    def _refusal(self, owner: Mapping[str, Any] | None) -> ConfigError:
        return ConfigError(
            self._key,
            f"expected a folder that no other run uses, got {self._folder}, which {_who(owner)} "
            "uses. Wait for that run, stop it, or give another folder; if it is dead for certain, "
            f"delete {self._path}",
        )

    def touch(self) -> None:
        """Shows that the owner is alive. Ends the process if another one has become the owner."""
        owner = _read(self._path)
        if owner in (None, self._owner):  # None: deleted, or its server does not answer
            with contextlib.suppress(OSError):
                os.utime(self._handle)
            return
        # Anything that this run still wrote would damage the other one.
        print(
            f"pretrain: error: {self._key}: {_who(owner)} has taken over {self._folder}, because "
            f"this run stood still for {_DEAD_AFTER:.0f} s or {self._path} was deleted; it ends",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    def set_aside(self) -> None:
        """Renames the folder if an earlier run has left anything in it. `take` has to follow."""
        if self._folder.exists() and any(path.name != _NAME for path in self._folder.iterdir()):
            aside = set_aside(self._folder, "previous")
            logger.info("resume is never: %s is now %s", self._folder, aside)
            (aside / _NAME).unlink(missing_ok=True)
            self.drop()

    @property
    def is_held(self) -> bool:
        """Whether `take` has been called, and neither `release` nor `drop` after it."""
        return self._handle >= 0

    def release(self) -> None:
        """Deletes the lock, and the folder too if this made it and it is empty."""
        with contextlib.suppress(OSError):
            if _is_at(self._handle, self._path):
                self._path.unlink()
            if self._made_folder:
                self._folder.rmdir()
        self.drop()

    def drop(self) -> None:
        """Closes the file, which ends the flock unless another process has the file open."""
        _held.discard(self)
        os.close(self._handle)
        self._handle = -1


class RunLock:
    """The lock of a run's folder, which a thread keeps alive.

    Args:
        folder: made if missing.

    Raises:
        ConfigError: another run has it, or may have it.
    """

    def __init__(self, folder: Path) -> None:
        self._lock = _FolderLock("run_dir", folder)
        self._mutex = threading.Lock()
        self._users = 1
        self._released = threading.Event()
        threading.Thread(target=self._keep_alive, name="run-lock", daemon=True).start()
        try:
            self._lock.take()
        except BaseException:
            self._released.set()
            raise

    def set_aside(self) -> None:
        """Renames a folder that is not empty to `<folder>.previous-<n>`, and locks a new one."""
        with self._mutex:
            self._lock.set_aside()
            if not self._lock.is_held:
                self._lock.take()

    def retain(self) -> None:
        """Asks for one more `release` before the folder is free, as while a thread writes."""
        with self._mutex:
            self._users += 1

    def release(self) -> None:
        """Frees the folder after as many calls as there were of `retain`, and one."""
        with self._mutex:
            self._users -= 1
            if self._users == 0:
                self._released.set()
                if self._lock.is_held:
                    self._lock.release()

    def _keep_alive(self) -> None:
        while not self._released.wait(_TOUCH_EVERY):
            with self._mutex:
                if self._lock.is_held:
                    self._lock.touch()


@contextlib.contextmanager
def run_lock(config: PretrainConfig, ranks: Ranks) -> Iterator[RunLock | None]:
    """Inside, no other run uses the run's folder.

    All ranks have to call it. Makes the folder.

    Yields:
        The lock on rank 0, None on the others.

    Raises:
        ConfigError: on all ranks, if another run uses the folder.
    """
    lock: RunLock | None = None

    def take() -> None:
        nonlocal lock
        lock = RunLock(Path(config.run_dir))

    try:
        ranks.on_first(take)
        yield lock
    finally:
        if lock is not None:
            lock.release()


def _drop_inherited() -> None:
    """A forked child that outlives its parent must not keep the parent's flocks."""
    for lock in list(_held):
        lock.drop()


os.register_at_fork(after_in_child=_drop_inherited)


def _open(path: Path) -> tuple[int, bool]:
    """The open file, and whether this process, alone of all, has made it."""
    while True:
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), True
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):
                return os.open(path, os.O_RDWR), False


def _flock(handle: int, wait: bool) -> bool | None:
    """Whether this process now has the file's flock; None on a file system without flocks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_FLOCK:
            return None
        raise
    return True


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _read(path: Path) -> dict[str, Any] | None:
    """Who the file names as its owner; None if it cannot be read or is being written right now."""
    try:
        owner = json.loads(read_regular(path))
        return owner if owner.keys() == {"host", "boot", "pid", "since"} else None
    except (AttributeError, OSError, RecursionError, ValueError):
        return None


def _this_machine() -> dict[str, str]:
    """The host, and which start of it: what tells two hosts of one name apart too."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return {
        "host": socket.gethostname(),
        "boot": path.read_text("ascii").strip() if path.exists() else "",
    }


def _now(folder: Path) -> float:
    """The file system's clock, which may be another host's."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=f"{_NAME}-clock-") as probe:
        return os.fstat(probe.fileno()).st_mtime


def _who(owner: Mapping[str, Any] | None) -> str:
    if owner is None:
        return "another process"
    return f"process {owner['pid']} on host {owner['host']} (since {owner['since']})"
