"""The range of each option by itself: what holds for all numbers and paths, and one table."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from bert_unpad.pretrain.config.errors import ConfigError

_INTEGERS = 2**63  # every integer of a run fits in 64 bits with a sign
_FLOAT32_MAX = 3.4028234e38


class _Range(NamedTuple):
    """Smallest and greatest value that is allowed, and how an error describes them."""

    low: float
    high: float
    text: str


def _at_least(low: int) -> _Range:
    return _Range(low, math.inf, f"a number >= {low}")


def _between(low: float, high: float) -> _Range:
    return _Range(low, high, f"a number in {low:g} .. {high:g}")


_ABOVE_ZERO = math.nextafter(0.0, 1.0)
_BELOW_ONE = math.nextafter(1.0, 0.0)

# Of an option that is given; of each number if it is a list.
_RANGES: dict[str, _Range] = {
    "seed": _at_least(0),
    "amax_history": _at_least(1),
    "rank_timeout": _between(1, 1e6),
    "batching.global_batch_size": _at_least(1),
    "batching.batch_size_per_rank": _at_least(1),
    "batching.warmup_batch_size": _at_least(1),
    "batching.warmup_steps": _at_least(1),
    "batching.accumulation": _at_least(1),
    "batching.rank_speeds": _Range(1e-3, 1e3, "numbers in 0.001 .. 1000, or auto"),
    "batching.shuffle_buffer": _at_least(1),
    "schedule.total_steps": _at_least(1),
    "schedule.epochs": _at_least(1),
    "schedule.warmup_steps": _at_least(0),
    "schedule.warmup_share": _between(0, 1),
    "schedule.power": _at_least(0),
    "schedule.decay_share": _between(0, 1),
    "schedule.end_lr_share": _between(0, 1),
    "model.generator_share": _Range(_ABOVE_ZERO, 1, "a number > 0 and <= 1"),
    "optimizer.lr": _at_least(0),
    "optimizer.betas": _Range(0, _BELOW_ONE, "numbers in [0, 1)"),
    "optimizer.eps": _at_least(0),
    "optimizer.weight_decay": _at_least(0),
    "growth.layers": _Range(1, math.inf, "ascending numbers >= 1"),
    "growth.lengths": _Range(1, math.inf, "ascending numbers >= 1"),
    "growth.shares": _Range(_ABOVE_ZERO, math.inf, "numbers > 0"),
    "growth.joint_share": _between(0, 1),
    "clip.max_norm": _at_least(0),
    "loss_scale.initial": _Range(_ABOVE_ZERO, _FLOAT32_MAX, "a number > 0 that fits in float32"),
    "loss_scale.growth_interval": _at_least(1),
    "comm.bucket_mb": _Range(_ABOVE_ZERO, math.inf, "a number > 0"),
    "comm.start": _at_least(0),
    "comm.local_sgd_period": _at_least(2),
    "comm.local_sgd_group": _at_least(1),
    "comm.chunk_share": _Range(_ABOVE_ZERO, 1, "a number > 0 and <= 1"),
    "comm.chunk_size": _at_least(1),
    "checkpoint.every": _at_least(0),
    "checkpoint.keep_last": _at_least(1),
    "evaluation.every": _at_least(0),
    "evaluation.every_samples": _Range(1, math.inf, "a number >= 1, or mlperf"),
    "evaluation.examples": _at_least(0),
    "evaluation.target_accuracy": _between(0, 1),
    "logging.every": _at_least(1),
}

_FOLDERS = ("run_dir", "data.cache_dir")


def check_ranges(config: Any) -> None:
    """Checks every option by itself.

    Args:
        config: a dataclass of options and of sections, which are dataclasses.

    Raises:
        ConfigError: a number is not finite, an integer has more than 64 bits, a number is out of
            its range, or the path of a folder is empty.
    """
    for name, value in _values(config):
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(name, f"expected a finite number, got {value!r}")
        if isinstance(value, int) and not -_INTEGERS <= value < _INTEGERS:
            raise ConfigError(name, f"expected an integer of at most 64 bits (< 2^63), got {value}")
        wanted = _RANGES.get(name)
        if wanted and not isinstance(value, str) and not wanted.low <= value <= wanted.high:
            raise ConfigError(name, f"expected {wanted.text}, got {value!r}")
        if name in _FOLDERS and (not value.strip() or "\0" in value):
            raise ConfigError(name, f"expected the path of a folder, got {value!r}")


def _values(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is given with its option's name; the values of a list one by one."""
    for field in dataclasses.fields(section):
        value, name = getattr(section, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from _values(value, f"{name}.")
            continue
        for single in value if isinstance(value, list | tuple) else [value]:
            if single is not None:
                yield name, single
