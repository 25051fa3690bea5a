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
    """Checks logging.mlperf_submission, and what the division asks of other settings.

    Raises:
        ConfigError: an entry of a submission is unknown, or the division does not allow a setting.
    """
    if config.logging.mlperf is None:
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
    for name, allowed in _CLOSED.items() if division == "closed" else ():
        value = operator.attrgetter(name)(config)
        if value not in allowed:
            words = " or ".join("null" if x is None else str(x) for x in allowed)
            raise ConfigError(
                name, f"expected {words} in the closed division of logging.mlperf, got {value}"
            )
