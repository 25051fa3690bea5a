"""The rules between options: what `limits` lists, and what is no pair of options.

What a run needs beyond its options (the data, the number of ranks, the device) is checked where
that is known.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING, get_args

from bert_unpad._choices import OptimizerName
from bert_unpad.pretrain.config.errors import ConfigError
from bert_unpad.pretrain.config.growth import GrowthConfig
from bert_unpad.pretrain.config.limits import LIMITS
from bert_unpad.pretrain.config.mlperf import check_mlperf

if TYPE_CHECKING:
    from bert_unpad.pretrain.config.run import PretrainConfig


def check_rules(config: PretrainConfig) -> None:
    """Checks all rules between options.

    Raises:
        ConfigError: options contradict each other, or one is missing.
    """
    _check_optimizer(config.optimizer.name)
    for limit in LIMITS:
        limit.check(config)
    _check_growth(config.growth)
    check_mlperf(config)


def _check_optimizer(name: str) -> None:
    """A name of the table, or what may be an import path; nothing is imported yet."""
    known = get_args(OptimizerName)
    if name not in known and not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", name):
        raise ConfigError(
            "optimizer.name",
            f"expected one of {', '.join(known)}, or an import path such as torch.optim.SGD, got "
            f"{name!r}",
        )


def _check_growth(growth: GrowthConfig) -> None:
    """Numbers that ascend, and shares of all stages that add up to 1."""
    for name in ("layers", "lengths"):
        values = getattr(growth, name)
        if values is not None and not (values and all(a < b for a, b in pairwise(values))):
            raise ConfigError(f"growth.{name}", f"expected ascending numbers >= 1, got {values}")
    if growth.shares is None:
        return
    total = sum(growth.shares) + (growth.joint_share or 0.0)
    if abs(total - 1) > 1e-6:
        raise ConfigError(
            "growth.shares", f"expected a sum of 1 together with growth.joint_share, got {total:g}"
        )
    stages = growth.lengths if growth.name == "lengths" else growth.layers
    if stages is not None and len(growth.shares) != len(stages):
        raise ConfigError(
            "growth.shares",
            f"expected a number for each of {len(stages)} stages, got {len(growth.shares)}",
        )
