"""Folders of checkpoints: their names, their checksums, and which of them to go on from.

A checkpoint's folder has a file `checksums.json` with the size and CRC-32 of every other file in
it. So a checkpoint that was cut short by a full disk, a copy or a failing disk is recognised before
anything is loaded from it, and the one before it is used instead.
"""

import json
import logging
import os
import re
import zlib
from collections.abc import Iterable
from pathlib import Path

from bert_unpad._files import open_regular, read_regular, set_aside, sync_folder
from bert_unpad.pretrain.config import ConfigError

logger = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{9})")
_CHECKSUMS = "checksums.json"
_METADATA = ".metadata"  # written by PyTorch: says what is where in the other files
_CHUNK = 1 << 22


def checkpoint_name(step: int) -> str:
    """Name of the folder of a step's checkpoint."""
    return f"step-{step:09d}"


def all_checkpoints(directory: Path) -> list[Path]:
    """All folders with the name of a checkpoint, oldest first; some may be damaged."""
    if not directory.is_dir():
        return []
    return sorted(x for x in directory.iterdir() if _NAME.fullmatch(x.name) and x.is_dir())


def newest_checkpoint(directory: Path) -> Path | None:
    """The checkpoint with the highest step whose files are all there and unchanged.

    Logs which newer ones it has left out, and why. Reads all files of the checkpoint.

    Returns:
        Its folder; None if there are no checkpoints at all.

    Raises:
        ConfigError: there are checkpoints, and all of them are damaged.
    """
    found = all_checkpoints(directory)
    for path in reversed(found):
        damage = _damage(path)
        if damage is None:
            return path
        logger.warning("%s is damaged and left out: %s", path, damage)
    if found:
        raise ConfigError(
            "resume",
            f"expected a whole checkpoint in {directory}, got {len(found)} damaged: "
            f"{found[-1].name}: {damage}. Restore one of them, or start over with --resume never",
        )
    return None


def how_to_continue(directory: Path, resume: str) -> str:
    """How a run that an error ends goes on once the cause is gone, for the error's message.

    Args:
        directory: of the checkpoints.
        resume: the setting of that name.
    """
    found = all_checkpoints(directory)
    if not found:
        return "The same command then starts again: no checkpoint has been saved yet"
    command = "The same command" + " with --resume auto" * (resume == "never")
    step = int(found[-1].name.removeprefix("step-"))
    return f"{command} then continues from step {step}, whose checkpoint is whole"


def set_damaged_aside(paths: Iterable[Path]) -> None:
    """Renames checkpoints, so that they neither count nor stand in the way of new ones."""
    for path in paths:
        logger.warning("%s is damaged and now called %s", path, set_aside(path, "damaged").name)


def write_checksums(folder: Path, names: Iterable[str]) -> None:
    """Completes a checkpoint's folder, and waits until it is on disk.

    Args:
        folder: that all ranks have written to.
        names: the files they have written. `.metadata` is added.

    Raises:
        FileNotFoundError: one of them is missing: the ranks do not see the same folder.
    """
    files = {}
    for name in sorted({*names, _METADATA}):
        size, checksum = _checksum(folder / name, sync=True)
        files[name] = {"bytes": size, "crc32": checksum}
    with (folder / _CHECKSUMS).open("w", encoding="utf-8") as file:
        json.dump({"files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def _damage(path: Path) -> str | None:
    """What is wrong with a checkpoint; None if it is whole."""
    try:
        files = json.loads(read_regular(path / _CHECKSUMS))["files"]
        if _METADATA not in files:
            return f"{_CHECKSUMS} does not list {_METADATA}"
        expected = {name: (values["bytes"], values["crc32"]) for name, values in files.items()}
    except OSError as error:
        return f"{_CHECKSUMS} cannot be read ({error.strerror})"
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return f"{_CHECKSUMS} is not a list of files"
    for name, (size, checksum) in expected.items():
        try:
            found = (path / name).stat().st_size
            if found != size:  # known without reading gigabytes
                return f"{name}: expected {size} bytes, got {found}"
            if _checksum(path / name) != (size, checksum):
                return f"{name}: its checksum is another one"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        except ValueError:
            return f"{_CHECKSUMS} lists {name!r}, which cannot be the name of a file"
    return None


def _checksum(path: Path, sync: bool = False) -> tuple[int, int]:
    """Size in bytes and CRC-32 of a file; `sync` first waits until it is on disk."""
    size = checksum = 0
    buffer = memoryview(bytearray(_CHUNK))
    with open_regular(path) as file:
        if sync:  # PyTorch before 2.15 leaves the end of a file in a buffer when it does so
            os.fsync(file.fileno())
        while count := file.readinto(buffer):
            checksum = zlib.crc32(buffer[:count], checksum)
            size += count
    return size, checksum
