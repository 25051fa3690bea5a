"""Settings of what a run leaves behind and tells: checkpoints, evaluation, logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass
class CheckpointConfig:
    """Checkpoints to resume from."""

    dir: str | None = None
    """By default `checkpoints` in run_dir. All ranks must see the same folder."""
    every: int = 1000
    """Updates between checkpoints; 0 saves at the end and on SIGTERM only."""
    keep_last: int = 2
    """Older ones are deleted."""
    background: bool = True
    """Train on while a checkpoint is written. False waits until it is on disk: then a worker that
    dies loses at most one update that was made, with `every: 1`; in the background, two."""


@dataclass
class EvaluationConfig:
    """Masked-token accuracy and loss on held-out examples, always with the same masks."""

    every: int = 1000
    """Updates between evaluations; 0 evaluates at the end only."""
    examples: int = 10_000
    """How many, at most."""
    batch_size: int = 32
    """Sequences per forward pass on one rank."""
    target_accuracy: float | None = None
    """Training ends when masked-token accuracy reaches this, in 0 .. 1."""


@dataclass
class LoggingConfig:
    """What a run tells while it runs and when it ends."""

    every: int = 10
    """Updates between lines of metrics.jsonl; losses stay on the device in between."""
    progress: Literal["auto", "bar", "lines", "none"] = "auto"
    """auto: a bar on a terminal, else lines."""
    plots: bool = True
    """Draw PNGs when the run ends (needs matplotlib)."""
    tensorboard: bool = False
    """Write TensorBoard event files too (needs tensorboard)."""
    examples: bool = False
    """Write which examples each rank used in each step, to examples.rank<r>.jsonl."""
