"""The run's resolved configuration, saved as config.yaml."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import yaml

from bert_unpad._files import write_text

logger = logging.getLogger(__name__)


def save_settings(run_dir: Path, resolved: str) -> None:
    """Saves the resolved configuration as config.yaml; says what differs from one saved before."""
    path = run_dir / "config.yaml"
    if path.is_file():
        old, new = (_flat(yaml.safe_load(text)) for text in (path.read_text("utf-8"), resolved))
        changed = [
            f"{key}: {old.get(key)} -> {new.get(key)}"
            for key in sorted(old.keys() | new.keys())
            if old.get(key) != new.get(key) and key != "resume"
        ]
        if changed:
            logger.info("settings changed since the last start: %s", "; ".join(changed))
    write_text(path, resolved)


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat
