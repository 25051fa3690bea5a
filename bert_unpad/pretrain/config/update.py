"""Settings of an update of the parameters: optimizer, learning rate, bound on the gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bert_unpad._choices import OptimizerName, Shard
from bert_unpad.pretrain.config.errors import ConfigError

_FLOAT32_MAX = 3.4028234e38  # the scale is a float32 on the device


@dataclass
class OptimizerConfig:
    """The optimizer. Biases and LayerNorm parameters get no weight decay."""

    name: OptimizerName = "adamw"
    """adamw: PyTorch's own; fused_adam: the same by bert_unpad.optim; lamb or lans, for large
    batches, whose learning rate counts relative to each weight's norm."""
    lr: float = 1e-4
    """Learning rate at the end of the warm-up."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.01
    shard: Shard = "none"
    """Who keeps the optimizer's state: every rank all of it; or the ranks of each machine, or all,
    a part each. Updated weights then travel within the machine, or between all ranks."""


@dataclass
class ScheduleConfig:
    """Linear warm-up, then polynomial decay. Give total_steps or epochs."""

    total_steps: int | None = None
    epochs: int | None = None
    warmup_steps: int | None = None
    """Updates of the warm-up; 0 for none."""
    warmup_share: float | None = None
    """The same as a share of all updates."""
    start_warmup_step: int = 0
    """Update before which the warm-up begins, as in MLPerf's rules: negative numbers start it
    above zero."""
    power: float = 1.0
    """Degree of the decay."""
    end_lr_share: float = 0.0
    """Learning rate that the decay ends at, as a share of optimizer.lr."""


@dataclass
class ClipConfig:
    """Bound on the norm of the gradient."""

    max_norm: float = 1.0
    mode: Literal["bucket", "before", "after", "none"] = "after"
    """bucket: each rank clips bucket by bucket before they are averaged, while the backward pass
    goes on. before: each rank clips its whole gradient, then they are averaged. after: clip the
    average. The norm of the average is at most max_norm in all three."""
    policy: Literal["equal", "numel", "adaptive"] = "equal"
    """How bucket shares max_norm^2 out: in equal parts, by the buckets' sizes, or by their shares
    of the squared norm in the step before."""
    wire_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Type in which gradients travel between ranks; fp16 with bucket and before only."""
    error_feedback: bool = False
    """Add what the cast to wire_dtype loses to the next step's gradient (takes memory for one more
    gradient; a resumed run begins without it)."""


@dataclass
class LossScaleConfig:
    """precision fp16: what losses are multiplied by, so that gradients do not underflow."""

    initial: float = 65536.0
    """At the beginning."""
    growth_factor: float = 2.0
    """What it is multiplied by after growth_interval updates without an overflow."""
    backoff_factor: float = 0.5
    """What it is multiplied by after an overflow, whose update is left out."""
    growth_interval: int = 2000
    """Updates in a row."""


def check_loss_scale(scale: LossScaleConfig) -> None:
    """Checks the ranges.

    Raises:
        ConfigError: see its message.
    """
    if not 0 < scale.initial <= _FLOAT32_MAX:
        raise ConfigError(
            "loss_scale.initial", f"expected a finite number > 0, got {scale.initial!r}"
        )
    if not 1 < scale.growth_factor <= _FLOAT32_MAX:
        raise ConfigError(
            "loss_scale.growth_factor", f"expected a number > 1, got {scale.growth_factor!r}"
        )
    if not 0 < scale.backoff_factor < 1:
        raise ConfigError(
            "loss_scale.backoff_factor",
            f"expected a number between 0 and 1, got {scale.backoff_factor!r}",
        )


def check_clip(clip: ClipConfig) -> None:
    """Checks which settings of clipping go together.

    Raises:
        ConfigError: see its message.
    """
    bounded = clip.mode in ("bucket", "before")
    if bounded and not clip.max_norm > 0:
        raise ConfigError("clip.max_norm", f"clip.mode {clip.mode} needs more than 0")
    if clip.wire_dtype == "fp16" and not (bounded and clip.max_norm <= 65504):
        raise ConfigError(
            "clip.wire_dtype",
            "fp16 needs clip.mode bucket or before, with clip.max_norm of at most 65504",
        )
    if clip.error_feedback and (clip.wire_dtype == "fp32" or clip.mode == "before"):
        raise ConfigError(
            "clip.error_feedback",
            "needs clip.wire_dtype bf16 or fp16, and another mode than before",
        )
