"""A run's folders: whether it may make them, and the settings that it saves there at its start."""

import logging
import os
from pathlib import Path
from typing import Any

import yaml

from bert_unpad._files import read_regular, set_aside, write_text
from bert_unpad.data.store.cache import chosen_cache_dir
from bert_unpad.pretrain.config import ConfigError, PretrainConfig
from bert_unpad.pretrain.ranks import Ranks

logger = logging.getLogger(__name__)


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


def save_settings(run_dir: Path, resolved: str) -> None:
    """Saves the resolved configuration as config.yaml; says what differs from one saved before."""
    path = run_dir / "config.yaml"
    if os.path.lexists(path) and (old := _saved(path)) is not None:
        new = _flat(yaml.safe_load(resolved))
        changed = [
            f"{key}: {old.get(key)} -> {new.get(key)}"
            for key in sorted(old.keys() | new.keys())
            if old.get(key) != new.get(key) and key != "resume"
        ]
        if changed:
            logger.info("settings changed since the last start: %s", "; ".join(changed))
    write_text(path, resolved)


def _saved(path: Path) -> dict[str, Any] | None:
    """What an earlier start has saved; a damaged file is renamed, because nothing needs it."""
    try:
        settings = yaml.safe_load(read_regular(path))
        if not isinstance(settings, dict):
            raise ValueError(f"expected options in YAML, got {settings!r}")
        return _flat(settings)
    except (OSError, RecursionError, ValueError, yaml.YAMLError) as error:
        aside = set_aside(path, "damaged")
        problem = " ".join(str(error).split())
        logger.warning("%s is damaged and now called %s: %s", path, aside.name, problem)
        return None


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat
