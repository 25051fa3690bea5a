"""Says which file had no room, and how much there is, where a disk or a user's quota is full."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)
# What PyTorch, numpy and safetensors say of a write that was cut short; they drop its errno.
_CUT_SHORT = re.compile(
    rf"unexpected pos \d+ vs \d+|\d+ requested and \d+ written|os error ({_FULL[0]}|{_FULL[1]})\b"
)


class FullDiskError(OSError):
    """No room for a file; its text says which one, and how many bytes it needs and there are."""

    def __str__(self) -> str:
        return self.strerror or ""


@contextmanager
def named_if_full(path: str | os.PathLike[str], needed: int | None = None) -> Iterator[None]:
    """Raises a FullDiskError in place of an error inside that comes from a full disk.

    Args:
        path: what is being written inside, unless the error names a file itself.
        needed: bytes that it takes at least, where that is known.
    """
    try:
        yield
    except BaseException as error:
        cause = _cause(error)
        if cause is None or (cause is error and isinstance(error, FullDiskError)):
            raise
        if isinstance(cause, FullDiskError):  # which something else has caught meanwhile
            raise FullDiskError(*cause.args) from error
        number = getattr(cause, "errno", None) or errno.ENOSPC
        path = Path(getattr(cause, "filename", None) or path).absolute()
        free = _free(path)
        room = f"room for {needed:,} bytes" if needed and needed > free else "more room"
        raise FullDiskError(
            number, f"{path}: expected {room}, got {free:,} bytes free ({os.strerror(number)})"
        ) from error


def _cause(error: BaseException) -> BaseException | None:
    """The error of the write that had no room, among those that have led to `error`."""
    seen, left = [], [error]
    while left:
        one = left.pop()
        if (isinstance(one, OSError) and one.errno in _FULL) or _CUT_SHORT.search(str(one)):
            return one
        seen.append(one)
        of_ranks = getattr(one, "failures", {})  # of a checkpoint, each with its stack
        found = [one.__cause__ or one.__context__, *(pair[0] for pair in of_ranks.values())]
        left += [each for each in found if each is not None and each not in seen]
    return None


def _free(path: Path) -> int:
    """Free bytes of the disk that a file is on, or would be."""
    while not os.path.exists(path):
        path = path.parent
    return shutil.disk_usage(path).free
