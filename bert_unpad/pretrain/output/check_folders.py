"""Finds out at the start whether a run may make the folders that it is told to use."""

from __future__ import annotations

import os
from pathlib import Path

from bert_unpad.data.store.cache import chosen_cache_dir
from bert_unpad.pretrain.config import ConfigError, PretrainConfig
from bert_unpad.pretrain.ranks import Ranks


def check_folders(config: PretrainConfig, ranks: Ranks) -> None:
    """Checks the folders of a run on rank 0, and makes none; every rank must call it.

    Raises:
        ConfigError: (on all ranks) something is in the way of a folder, or it may not be made or
            written to.
    """
    problem = ranks.from_first(_problem(config) if ranks.is_first else None)
    if problem is not None:
        raise ConfigError(*problem)


def _problem(config: PretrainConfig) -> tuple[str, str] | None:
    """The key and the message, if there is a problem."""
    cache = chosen_cache_dir(config.data.cache_dir)
    folders = {
        "run_dir": Path(config.run_dir),
        "data.cache_dir": cache,
    }
    if config.logging.mlperf is not None:
        folders["logging.mlperf"] = Path(config.logging.mlperf).parent
    for key, folder in folders.items():
        # Nothing is written to a cache that has the data already.
        obstacle = _obstacle(folder, write=folder is not cache)
        if obstacle is not None:
            return key, f"expected a folder to write to, got {str(folder)!r}: {obstacle}"
    return None


def _obstacle(folder: Path, write: bool) -> str | None:
    """What keeps a folder from being made or, with `write`, from being written to."""
    there = folder = folder.absolute()
    while not os.path.lexists(there):
        there = there.parent
    if not there.is_dir():
        return f"{there} is not a folder"
    if (write or there != folder) and not os.access(there, os.W_OK | os.X_OK):
        return f"no permission to write to {there}"
    return None
