"""Options of what a run saves and reports: checkpoints, evaluation, logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bert_unpad._tiers import advanced


@dataclass
class CheckpointConfig:
    """Checkpoints, from which a run resumes; they are in the folder `checkpoints` of run_dir."""

    every: int = 1000
    """Updates between checkpoints. With 0 a run saves only at the end and on SIGTERM."""
    keep_last: int = 2
    """Checkpoints to keep; older ones are deleted."""
    background: bool = advanced(True)
    """Continue training while a checkpoint is written. With false, training waits until it is on
    disk: with checkpoint.every 1 a worker that dies then loses at most one update instead of
    two."""


@dataclass
class EvaluationConfig:
    """Masked-token accuracy and loss on held-out examples, always with the same masks."""

    every: int = 1000
    """Updates between evaluations. With 0 a run evaluates only at the end."""
    examples: int = 10_000
    """Most examples of an evaluation. With 0 there is no evaluation."""
    target_accuracy: float | None = None
    """Masked-token accuracy, 0 to 1, at which training ends. By default it ends with the
    schedule."""


@dataclass
class LoggingConfig:
    """What a run reports during training."""

    every: int = 10
    """Updates between lines of metrics.jsonl; losses stay on the device in between."""
    progress: Literal["auto", "bar", "lines", "none"] = "auto"
    """How progress is shown. auto: a bar on a terminal, otherwise lines."""
    tensorboard: bool = advanced(False)
    """Write TensorBoard event files too. Needs the package tensorboard."""
    examples: bool = advanced(False)
    """Write which examples each rank used in each step, to examples.rank<r>.jsonl."""
