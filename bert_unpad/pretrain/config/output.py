"""Options of what a run saves and reports: checkpoints, evaluation, logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from bert_unpad._tiers import advanced
from bert_unpad.pretrain.config.mlperf import evaluation_interval


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
    every_samples: int | Literal["mlperf"] | None = advanced(None)
    """Sequences trained on between evaluations, in place of evaluation.every; rounded up to whole
    updates. mlperf: as many as MLPerf's rules for BERT say for the global batch."""
    examples: int = 10_000
    """Most examples of an evaluation. Of more, those whose lengths are as in training. With 0 there
    is no evaluation."""
    target_accuracy: float | None = None
    """Masked-token accuracy, 0 to 1, at which training ends. By default it ends with the
    schedule."""

    def updates_between(self, global_batch_size: int) -> int:
        """Updates between evaluations, for so many sequences per update."""
        samples = self.every_samples
        if samples is None:
            return self.every
        if samples == "mlperf":
            samples = evaluation_interval(global_batch_size)
        return -(-samples // global_batch_size)


@dataclass
class LoggingConfig:
    """What a run reports during training."""

    every: int = 10
    """Updates between lines of metrics.jsonl; losses stay on the device in between."""
    progress: Literal["auto", "bar", "lines", "none"] = "auto"
    """How progress is shown. auto: a bar on a terminal, otherwise lines."""
    tracker: Literal["none", "tensorboard", "wandb"] = advanced("none")
    """Where figures go too. tensorboard: event files in run_dir. wandb: Weights & Biases, in the
    project that WANDB_PROJECT names. Needs the package of this name."""
    examples: bool = advanced(False)
    """Write which examples each rank used in each step, to examples.rank<r>.jsonl."""
    mlperf: str | None = advanced(None)
    """File for MLPerf's log of the run, by the package mlperf-logging. Such a run is not resumed,
    and ends at evaluation.target_accuracy."""
    mlperf_submission: dict[str, Any] | None = advanced(None)
    """Entries of that log that the run does not know, such as {"submission_org": "...",
    "submission_division": "closed", "cache_clear": true}. The division is closed by default."""
