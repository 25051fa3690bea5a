"""What a schedule of growth is: a list of stages, and what one update leaves out.

A schedule only says what is to be; the trainer makes it so at each border (see `grow` and
`pretrain.stages`), in the way it resumes from a checkpoint. A new schedule is one function that
returns a `Growth`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from bert_unpad.pretrain.config import ConfigError, GrowthConfig, ScheduleConfig
from bert_unpad.pretrain.update.schedule import lr_factor


@dataclass(frozen=True)
class Setting:
    """What a schedule is made for."""

    seed: int
    total_steps: int
    """Updates of the run."""
    layers: int
    """Encoder layers that the model shall have in the end."""
    max_seq_length: int
    """Longest example in the end, in tokens."""


@dataclass(frozen=True)
class Stage:
    """A stretch of a run in which the same parameters train, on the same data."""

    end: int
    """Updates made when it ends."""
    layers: int
    """Encoder layers."""
    max_seq_length: int
    """Longest example, in tokens."""
    frozen: int = 0
    """Layers from the bottom, and the embeddings below them, that run forward only."""
    sources: tuple[int, ...] = ()
    """For each layer that this stage adds: the one to copy."""


@dataclass(frozen=True)
class Growth:
    """A schedule."""

    stages: tuple[Stage, ...]
    learning_rate: Literal["continue", "rewarm", "restart"] = "continue"
    active_layers: Callable[[int], tuple[bool, ...]] | None = field(default=None)
    """Maps the number of updates made to which layers the next one trains; the same on all ranks.
    None: all of them, always."""

    def index(self, step: int) -> int:
        """The stage that the update after `step` updates belongs to."""
        for index, stage in enumerate(self.stages):
            if step < stage.end:
                return index
        return len(self.stages) - 1

    def begin(self, index: int) -> int:
        """Updates made when a stage begins."""
        return self.stages[index - 1].end if index else 0


def stage_shares(config: GrowthConfig, stages: int) -> list[float]:
    """The shares of the updates given, or equal ones."""
    if config.shares is None:
        return [(1.0 - (config.joint_share or 0.0)) / stages] * stages
    if len(config.shares) != stages:
        raise ConfigError(
            "growth.shares",
            f"expected a number for each of {stages} stages, got {len(config.shares)}",
        )
    return config.shares


def stage_ends(shares: Sequence[float], total_steps: int) -> list[int]:
    """Updates made at the end of each stage; the last is the end of the run.

    Raises:
        ConfigError: there are too few updates to give each stage one.
    """
    ends, done = [], 0.0
    for share in shares:
        done += share
        ends.append(round(done * total_steps))
    ends[-1] = total_steps
    if any(end <= begin for begin, end in pairwise([0, *ends])):
        raise ConfigError(
            "growth.shares",
            f"expected an update or more per stage, got ends {ends} of {total_steps} updates",
        )
    return ends


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
