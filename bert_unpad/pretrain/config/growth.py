"""Options of what trains when: layers that are added, frozen or left out; short sequences first.

The section is called `growth` because `schedule` is the learning rate's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bert_unpad._tiers import advanced


@dataclass
class GrowthConfig:
    """Which layers train in which updates, and at which lengths; see docs/training/growth.md."""

    name: Literal["none", "mslt", "stacking", "layer_drop", "lengths"] = "none"
    """Training in stages. none: everything trains all the time. mslt: start with few layers; each
    stage adds some on top and trains only these. stacking: each stage copies all layers on top of
    themselves and trains all. layer_drop (experimental): leave layers out at random, deep layers
    and late updates more often. lengths: short sequences first."""
    layers: list[int] | None = advanced(None)
    """With growth.name mslt or stacking: encoder layers of each stage; the last number is the
    model's. By default four equal steps (mslt), or doubling up from a quarter (stacking)."""
    lengths: list[int] | None = advanced(None)
    """With growth.name lengths: tokens of each stage's longest example; the last number is
    data.max_seq_length."""
    shares: list[float] | None = advanced(None)
    """With growth.name mslt, stacking or lengths: share of schedule.total_steps of each stage. By
    default equal shares of what growth.joint_share leaves."""
    joint_share: float | None = advanced(None)
    """With growth.name mslt: share of the updates, at the end, that trains all layers together. By
    default 0."""
    learning_rate: Literal["continue", "rewarm", "restart"] = advanced("continue")
    """With growth.name mslt, stacking or lengths: what a new stage does to the learning rate.
    continue: nothing. rewarm: warm up again to where the decay stands. restart: run warm-up and
    decay again in each stage."""
