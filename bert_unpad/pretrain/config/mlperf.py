"""What MLPerf Training's rules for BERT ask of a run's settings.

Sources: README of the benchmark's reference (mlcommons/training, language_model/tensorflow/bert)
for how often a run evaluates; the training rules (mlcommons/training_policies) for the closed
division.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

from bert_unpad.pretrain.config.errors import ConfigError

if TYPE_CHECKING:
    from bert_unpad.pretrain.config.run import PretrainConfig

__all__ = ["check_mlperf", "evaluation_interval", "submission"]

# What a submission says of itself, beside what the run says.
_SUBMISSION = (
    *("submission_division", "submission_org", "submission_platform", "submission_status"),
    *("submission_entry", "submission_poc_name", "submission_poc_email", "cache_clear"),
)
_DIVISIONS = ("closed", "open")
# What the closed division allows.
_CLOSED: dict[str, tuple[Any, ...]] = {
    "data.objective": ("mlm_nsp",),
    "optimizer.name": ("lamb",),
    "schedule.name": ("polynomial", "linear"),
    "schedule.decay_from": ("start",),
    "batching.warmup_batch_size": (None,),
    "comm.hook": ("allreduce", "hierarchical"),
    "growth.name": ("none",),
}


def evaluation_interval(global_batch_size: int) -> int:
    """Samples between evaluations by the formula in the reference's README."""
    return math.floor(0.05 * (230.23 * global_batch_size + 3_000_000) / 25_000) * 25_000


def submission(config: PretrainConfig) -> dict[str, Any]:
    """What logging.mlperf_submission says, in the closed division unless it says another."""
    return {"submission_division": "closed"} | (config.logging.mlperf_submission or {})


def check_mlperf(config: PretrainConfig) -> None:
    """Checks evaluation.every_samples, logging.mlperf and logging.mlperf_submission.

    Raises:
        ConfigError: updates have unequal numbers of sequences, an entry of a submission is unknown,
            or a setting is not one that the log has a place for or the division allows.
    """
    _check_interval(config)
    if config.logging.mlperf is None:
        if config.logging.mlperf_submission is not None:
            raise ConfigError(
                "logging.mlperf", "expected a file with logging.mlperf_submission, got null"
            )
        return
    for name in submission(config):
        if name not in _SUBMISSION:
            raise ConfigError(
                "logging.mlperf_submission",
                f"expected entries of {', '.join(_SUBMISSION)}, got {name!r}",
            )
    division = submission(config)["submission_division"]
    if division not in _DIVISIONS:
        raise ConfigError(
            "logging.mlperf_submission",
            f"expected a submission_division of {' or '.join(_DIVISIONS)}, got {division!r}",
        )
    for name in ("evaluation.target_accuracy", "schedule.total_steps"):
        if operator.attrgetter(name)(config) is None:
            raise ConfigError(name, "expected a number with logging.mlperf, got null")
    for name, allowed in _CLOSED.items() if division == "closed" else ():
        value = operator.attrgetter(name)(config)
        if value not in allowed:
            words = " or ".join("null" if x is None else str(x) for x in allowed)
            raise ConfigError(
                name, f"expected {words} in the closed division of logging.mlperf, got {value}"
            )


def _check_interval(config: PretrainConfig) -> None:
    if config.evaluation.every_samples is None:
        return
    for name, allowed in (
        ("strategy", ("stratified", "random", "exchange")),
        ("warmup_batch_size", (None,)),
    ):
        value = getattr(config.batching, name)
        if value not in allowed:
            words = " or ".join("null" if x is None else x for x in allowed)
            raise ConfigError(
                f"batching.{name}",
                f"expected {words} with evaluation.every_samples, which counts on as many "
                f"sequences in each update, got {value}",
            )
