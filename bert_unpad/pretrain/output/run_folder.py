"""The run's resolved configuration, saved as config.yaml."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import yaml

from bert_unpad._files import read_regular, set_aside, write_text

logger = logging.getLogger(__name__)


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
