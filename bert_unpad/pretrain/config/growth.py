"""Settings of what trains when: layers that join, freeze or are left out; short sequences first.

The section is called `growth` because `schedule` is the learning rate's.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Literal

from bert_unpad.pretrain.config.errors import ConfigError


@dataclass
class GrowthConfig:
    """Which layers train in which updates, and at which lengths; see docs/training/growth.md."""

    name: Literal["none", "mslt", "stacking", "layer_drop", "lengths"] = "none"
    """mslt: begin with few layers; each stage adds some on top and trains these alone. stacking:
    each stage copies all layers on top of themselves and trains all. layer_drop: leave layers out
    at random, deeper and later ones more often. lengths: short sequences first."""
    layers: list[int] | None = None
    """mslt, stacking: encoder layers of each stage, ending with the model's. By default four equal
    steps (mslt), or doubling up from a quarter (stacking)."""
    lengths: list[int] | None = None
    """lengths: longest example of each stage, in tokens, ending with data.max_seq_length."""
    shares: list[float] | None = None
    """mslt, stacking, lengths: share of schedule.total_steps that each stage gets; by default equal
    ones, of what joint_share leaves."""
    joint_share: float | None = None
    """mslt: share of the updates, at the end, that trains all layers together; 0 by default."""
    new_layers: Literal["copy", "fresh"] = "copy"
    """mslt: new layers begin as copies of those on top, with their optimizer states, or fresh."""
    decoder: Literal["trained", "frozen"] = "trained"
    """mslt: whether the word embedding still learns, as the decoder, while the embeddings run
    forward only. If so, what the frozen layers read moves along."""
    pooler: Literal["trained", "frozen"] = "trained"
    """mslt: the pooler, while layers are frozen."""
    learning_rate: Literal["continue", "rewarm", "restart"] = "continue"
    """mslt, stacking, lengths: continue takes no notice of stages; rewarm warms up at the start of
    each stage to where the decay stands; restart runs warm-up and decay anew in each stage."""
    theta: float | None = None
    """layer_drop: where the mean keep probability of the top layer goes; 0.5 by default."""
    gamma: float | None = None
    """layer_drop: how fast, per update; 100 / schedule.total_steps by default."""


_OWN = {
    "none": set(),
    "mslt": {
        *("layers", "shares", "joint_share", "new_layers", "decoder", "pooler", "learning_rate"),
    },
    "stacking": {"layers", "shares", "learning_rate"},
    "layer_drop": {"theta", "gamma"},
    "lengths": {"lengths", "shares", "learning_rate"},
}


def check_growth(growth: GrowthConfig) -> None:
    """Checks what the types do not, as far as it shows without model and data.

    Raises:
        ConfigError: see its message.
    """
    own = _OWN[growth.name] | {"name"}
    for key, value in asdict(growth).items():
        if key not in own and value != getattr(GrowthConfig, key):
            raise ConfigError(f"growth.{key}", f"growth.name {growth.name} does not read this")
    if growth.name == "lengths" and growth.lengths is None:
        raise ConfigError("growth.lengths", "growth.name lengths needs it, as in [128, 512]")
    for key in ("layers", "lengths"):
        values = getattr(growth, key)
        if values is not None and not (
            values and values[0] >= 1 and all(a < b for a, b in pairwise(values))
        ):
            raise ConfigError(f"growth.{key}", f"expected ascending numbers >= 1, got {values}")
    _check_shares(growth)


def _check_shares(growth: GrowthConfig) -> None:
    shares, joint = growth.shares, growth.joint_share or 0.0
    if shares is None:
        return
    if not all(share > 0 for share in shares):
        raise ConfigError("growth.shares", f"expected numbers > 0, got {shares}")
    if abs(sum(shares) + joint - 1) > 1e-6:
        raise ConfigError(
            "growth.shares",
            f"these and growth.joint_share must add up to 1, got {sum(shares) + joint:g}",
        )
    stages = growth.lengths if growth.name == "lengths" else growth.layers
    if stages is not None and len(shares) != len(stages):
        raise ConfigError(
            "growth.shares", f"expected one for each of {len(stages)} stages, got {len(shares)}"
        )
