"""A run's progress, which a checkpoint holds besides tensors, and its settings."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from bert_unpad._files import write_text
from bert_unpad.pretrain.config import ConfigError
from bert_unpad.pretrain.ranks import Ranks

__all__ = ["Progress", "on_first", "save_settings"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class Progress:
    """How far a run is; the part of a checkpoint that is no tensor. Counts are over all ranks."""

    step: int = 0
    """Updates made."""
    epoch: int = 0
    """Number of the epoch that the latest update's examples are from."""
    sequences: int = 0
    tokens: int = 0
    """Real tokens trained on."""
    padded: int = 0
    """Tokens that the same sequences would be with padding."""
    flops: float = 0.0
    """Of the model, forward and backward."""
    seconds: float = 0.0
    """Spent training."""
    stage: int = 0
    """The stage of growth that the latest update was made in."""
    layers: int | None = None
    """Encoder layers of that stage; None: all that the configuration asks for."""
    target_reached: bool = False
    """Whether evaluation.target_accuracy has ended the run."""
    sampler: dict[str, Any] = field(default_factory=dict)
    """State of the sampler after the latest update."""
    clip: dict[str, Any] = field(default_factory=dict)
    """What the next step's clipping depends on."""
    loss_scale: dict[str, Any] = field(default_factory=dict)
    """Of fp16; empty in other precisions."""
    window: dict[str, float] = field(default_factory=dict)
    """Sums of the log's current interval."""
    window_seconds: float = 0.0
    """Of `seconds`, those at the beginning of that interval."""

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return dataclasses.asdict(self)

    def add(self, counts: dict[str, float]) -> None:
        """Counts an update's examples."""
        self.sequences += int(counts["sequences"])
        self.tokens += int(counts["tokens"])
        self.padded += int(counts["padded"])
        self.flops += counts["flops"]


def on_first(ranks: Ranks, action: Callable[[], T]) -> T:
    """Calls `action` on rank 0 alone; its result, a small picklable object, on all ranks.

    Raises:
        ConfigError: on all ranks, if `action` raises it.
    """
    result, failure = None, None
    if ranks.is_first:
        try:
            result = action()
        except ConfigError as error:
            failure = error
    # The exception itself would not pickle.
    result, reason = ranks.from_first((result, failure and (failure.key, str(failure))))
    if reason is not None:
        key, message = reason
        raise ConfigError(key, message.removeprefix(f"{key}: ")) from failure
    return result


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
