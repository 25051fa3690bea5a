"""The learning rate of a run in stages, as a pure function of the number of updates made."""

from __future__ import annotations

from bert_unpad.pretrain.config import ScheduleConfig
from bert_unpad.pretrain.growth.stage import Growth
from bert_unpad.pretrain.update.schedule import lr_factor

__all__ = ["staged_lr_factor"]


def staged_lr_factor(
    step: int, schedule: ScheduleConfig, growth: Growth, total_steps: int, warmup_steps: int
) -> float:
    """Share of the peak learning rate for one update; see `GrowthConfig.learning_rate`.

    The warm-up of a stage is as long a share of the stage as the run's is of the run.

    Args:
        step: updates made before this one.
        schedule: of the learning rate.
        growth: its stages, and what they mean to the learning rate.
        total_steps: updates of the run.
        warmup_steps: of the run.
    """

    def factor(step: int, total_steps: int, warmup_steps: int) -> float:
        return lr_factor(step, schedule, total_steps=total_steps, warmup_steps=warmup_steps)

    index = growth.index(step)
    if growth.learning_rate == "continue" or (growth.learning_rate == "rewarm" and not index):
        return factor(step, total_steps, warmup_steps)
    begin = growth.begin(index)
    steps = growth.stages[index].end - begin
    warmup = round(warmup_steps * steps / total_steps)
    if growth.learning_rate == "restart":
        return factor(step - begin, steps, warmup)
    warmed = min((step - begin + 1) / warmup, 1.0) if warmup else 1.0
    return warmed * factor(step, total_steps, warmup_steps)
