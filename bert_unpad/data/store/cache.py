"""The cache folder, and what reading has found damaged in it."""

import os
import re
from contextlib import suppress
from pathlib import Path

from bert_unpad.data.store.manifest import DamagedDataError

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
