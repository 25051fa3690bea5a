"""The learning rate as a pure function of the number of updates made.

A function rather than a scheduler object, so that there is no state to save: a resumed run asks for
the factor of its step and gets the same bits.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from bert_unpad.pretrain.config import ConfigError, ScheduleConfig


@dataclass(frozen=True)
class _Place:
    """Where an update after the warm-up lies in the run."""

    step: int
    """Updates made before this one."""
    begin: int
    """Updates made when the decay begins."""
    total: int
    """Updates of the run."""
    warmup: int
    """Length of the warm-up."""
    start: int
    """Updates made when the warm-up begins."""

    def left(self, first: int) -> float:
        """Share of the updates from `first` on that are still to come, 0 .. 1."""
        return min(max(1.0 - (self.step - first) / max(self.total - first, 1), 0.0), 1.0)


def _cosine(at: _Place, schedule: ScheduleConfig) -> float:
    return 0.5 * (1.0 - math.cos(math.pi * at.left(at.begin)))


def _inverse_sqrt(at: _Place, schedule: ScheduleConfig) -> float:
    return min(math.sqrt(max(at.warmup, 1) / max(at.step + 1 - at.start, 1)), 1.0)


def _stable_decay(at: _Place, schedule: ScheduleConfig) -> float:
    decay = max(at.total - round(schedule.decay_share * at.total), at.begin)
    return 1.0 - math.sqrt(1.0 - at.left(decay))


_SHAPES: dict[str, Callable[[_Place, ScheduleConfig], float]] = {
    "polynomial": lambda at, schedule: at.left(at.begin) ** schedule.power,
    "linear": lambda at, schedule: at.left(at.begin),
    "cosine": _cosine,
    "constant": lambda at, schedule: 1.0,
    "inverse_sqrt": _inverse_sqrt,
    "wsd": _stable_decay,
}
"""What comes after the warm-up, by `schedule.name`; shares of what is above the end. Rows of
`config/limits.py` say which options each one reads."""


def lr_factor(
    step: int, schedule: ScheduleConfig, *, total_steps: int, warmup_steps: int = 0
) -> float:
    """Share of the peak learning rate for one update: linear warm-up, then `schedule.name`.

    The warm-up gives update n the share (n - start_warmup_step) / warmup_steps, so it ends with
    update `start_warmup_step + warmup_steps`. A decay runs over the updates after it and never
    reaches its end inside the run, so no update is wasted.

    With `decay_from: start` both are those of MLPerf's reference (mlcommons/training,
    language_model/tensorflow/bert/optimization.py): the decay runs over all updates of the run, the
    warm-up takes its place, and gives the update after n others the share
    (n - start_warmup_step) / warmup_steps.

    cosine: Loshchilov and Hutter (2017, arXiv:1608.03983), one cycle. inverse_sqrt: Vaswani et al.
    (2017, arXiv:1706.03762), update n of the warm-up's count w gets sqrt(w / n). wsd: Hu et al.
    (2024, arXiv:2404.06395), with a decay by 1 - sqrt of its share that is done (Hägele et al.,
    2024, arXiv:2405.18392).

    Args:
        step: updates made before this one, 0 .. total_steps - 1.
        schedule: its shape.
        total_steps: updates of the run.
        warmup_steps: length of the warm-up.
    """
    start, after_warmup = schedule.start_warmup_step, schedule.decay_from == "warmup"
    warmed = step - start + after_warmup
    if warmed < warmup_steps or step < start:
        return max(warmed, 0) / max(warmup_steps, 1)
    begin = max(warmup_steps + start, 0) if after_warmup else 0
    at = _Place(step, begin, total_steps, warmup_steps, start)
    end = schedule.end_lr_share
    return end + (1.0 - end) * _SHAPES[schedule.name](at, schedule)


def warmup_updates(schedule: ScheduleConfig, total_steps: int) -> int:
    """Length of the warm-up in updates, whichever way it is given.

    Raises:
        ConfigError: the warm-up is longer than the run.
    """
    if schedule.warmup_steps is not None:
        warmup = schedule.warmup_steps
    else:
        warmup = round((schedule.warmup_share or 0.0) * total_steps)
    if warmup + schedule.start_warmup_step > total_steps:
        raise ConfigError(
            "schedule.warmup_steps",
            f"expected an end within the run's {total_steps} updates, got "
            f"{warmup + schedule.start_warmup_step}",
        )
    return warmup
