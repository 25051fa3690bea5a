"""Writing files that appear whole or not at all, and reading JSON files that users provide."""

import contextlib
import errno
import hashlib
import io
import json
import os
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bert_unpad._full_disk import named_if_full


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary path next to `path`; renames it to `path` if the block succeeds.

    The block writes a file there and closes it. If the block raises, the temporary file is removed.
    A reader sees the old file or the new one, never a part, also after a power failure: the file is
    on disk before it gets its name. The random temporary name keeps several writers apart, on
    several machines too.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with named_if_full(path):
            yield temporary
            sync_file(temporary)
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a UTF-8 text file, which appears whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def open_regular(path: str | os.PathLike[str]) -> io.FileIO:
    """Opens a regular file for reading, without a buffer.

    Raises:
        OSError: it cannot be opened, or is a device or a pipe, which may have no end.
    """
    file = open(path, "rb", buffering=0, opener=_without_waiting)  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return file


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe would wait for a writer


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """All bytes of a regular file; errors as of `open_regular`."""
    with open_regular(path) as file:
        return file.read()


def set_aside(path: Path, ending: str) -> Path:
    """Renames a file or folder to `<path>.<ending>-<n>`, with the first free n from 1.

    Returns:
        The new path.
    """
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.{ending}-{number}")):
        number += 1
    os.rename(path, aside)
    return aside


def sync_file(path: Path) -> None:
    """Waits until a file is on disk, without which a later rename could survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(path: Path) -> None:
    """Makes files created or renamed in the folder survive a power failure."""
    if os.name == "posix":
        sync_file(path)


def file_sha256(path: Path) -> str:
    """Returns the hex SHA-256 of a file, read in 1 MiB pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def read_json_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a JSON file that holds an object.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged or holds something else; the message names it.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path} does not exist; expected a JSON file") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deeply
        raise ValueError(f"{path}: expected JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found
