"""The learning rate as a pure function of the number of updates made.

A function rather than a scheduler object, so that there is no state to save: a resumed run asks for
the factor of its step and gets the same bits.
"""

from __future__ import annotations

from bert_unpad.pretrain.config import ConfigError, ScheduleConfig

__all__ = ["lr_factor", "warmup_updates"]


def lr_factor(
    step: int,
    *,
    total_steps: int,
    warmup_steps: int = 0,
    start_warmup_step: int = 0,
    power: float = 1.0,
    end_share: float = 0.0,
) -> float:
    """Share of the peak learning rate for one update: linear warm-up, then polynomial decay.

    The warm-up gives update n the share (n - start_warmup_step) / warmup_steps, so it ends with
    update `start_warmup_step + warmup_steps`, as MLPerf's BERT recipes count it. The decay runs
    over the other updates and never reaches its end inside the run, so no update is wasted.

    Args:
        step: updates made before this one, 0 .. total_steps - 1.
        total_steps: updates of the run.
        warmup_steps: length of the warm-up.
        start_warmup_step: offset of the warm-up; negative starts it above zero.
        power: degree of the decay; 1 is linear.
        end_share: share that the decay ends at.
    """
    warmed = step + 1 - start_warmup_step
    if warmed < warmup_steps:
        return max(warmed, 0) / warmup_steps
    first = max(warmup_steps + start_warmup_step, 0)
    left = max(1.0 - (step - first) / max(total_steps - first, 1), 0.0)
    return end_share + (1.0 - end_share) * min(left, 1.0) ** power


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
