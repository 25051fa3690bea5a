"""Ranges of single settings: what holds for every number and path, and one table for the rest."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from bert_unpad.pretrain.config.errors import ConfigError

__all__ = ["MAX_THREADS", "check_ranges"]

MAX_THREADS = 4096
"""Most CPU threads of one process."""

_INTEGERS = 2**63  # every integer of a run fits in 64 bits with a sign

# Smallest and greatest value of a setting that is given; of each number if it is a list.
_RANGES: dict[str, tuple[float, float]] = {
    "seed": (0, math.inf),
    "threads": (1, MAX_THREADS),
    "rank_timeout": (1, 1e6),
    "data.seed": (0, math.inf),
    "batching.global_batch_size": (1, math.inf),
    "batching.batch_size_per_rank": (1, math.inf),
    "batching.accumulation": (1, math.inf),
    "batching.prefetch": (1, math.inf),
    "batching.max_sequences_per_row": (1, math.inf),
    "batching.shuffle_buffer": (1, math.inf),
    "batching.reader_timeout": (1, 1e6),
    "schedule.total_steps": (1, math.inf),
    "schedule.epochs": (1, math.inf),
    "schedule.warmup_steps": (0, math.inf),
    "schedule.warmup_share": (0, 1),
    "schedule.power": (0, math.inf),
    "schedule.end_lr_share": (0, 1),
    "optimizer.lr": (0, math.inf),
    "optimizer.eps": (0, math.inf),
    "optimizer.weight_decay": (0, math.inf),
    "growth.joint_share": (0, 1),
    "growth.theta": (0, 1),
    "growth.gamma": (0, math.inf),
    "clip.max_norm": (0, math.inf),
    "loss_scale.growth_interval": (1, math.inf),
    "comm.start": (0, math.inf),
    "comm.power_sgd_rank": (1, math.inf),
    "comm.local_sgd_period": (2, math.inf),
    "comm.local_sgd_group": (1, math.inf),
    "checkpoint.every": (0, math.inf),
    "checkpoint.keep_last": (1, math.inf),
    "evaluation.every": (0, math.inf),
    "evaluation.examples": (0, math.inf),
    "evaluation.batch_size": (1, math.inf),
    "evaluation.target_accuracy": (0, 1),
    "logging.every": (1, math.inf),
}

_FOLDERS = ("run_dir", "data.cache_dir", "checkpoint.dir")


def check_ranges(config: Any) -> None:
    """Checks every setting by itself.

    Args:
        config: a dataclass of settings and of sections, which are dataclasses.

    Raises:
        ConfigError: a number is not finite, an integer has more than 64 bits, a number is out of
            its range, or the path of a folder is none.
    """
    for key, value in _settings(config):
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(key, f"expected a finite number, got {value!r}")
        if isinstance(value, int) and not -_INTEGERS <= value < _INTEGERS:
            raise ConfigError(key, f"expected an integer of at most 64 bits (< 2^63), got {value}")
        if key in _RANGES:
            low, high = _RANGES[key]
            if not low <= value <= high:
                wanted = f">= {low}" if high == math.inf else f"in {low} .. {high:g}"
                raise ConfigError(key, f"expected a number {wanted}, got {value!r}")
        if key in _FOLDERS and (not value.strip() or "\0" in value):
            raise ConfigError(key, f"expected the path of a folder, got {value!r}")


def _settings(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is given with its key, as `section.key`; those of a list one by one."""
    for field in dataclasses.fields(section):
        value, key = getattr(section, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from _settings(value, f"{key}.")
            continue
        for single in value if isinstance(value, list | tuple) else [value]:
            if single is not None:
                yield key, single
