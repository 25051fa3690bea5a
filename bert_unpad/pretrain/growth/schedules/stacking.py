"""Progressive stacking: a trained model of L layers becomes one of 2 L, its layers twice over.

Gong et al. (2019), "Efficient Training of BERT by Progressively Stacking" (ICML). All layers train
in every stage. New layers take the optimizer's states of those they are copies of along.
"""

from __future__ import annotations

from itertools import pairwise

from bert_unpad.pretrain.config import ConfigError, GrowthConfig
from bert_unpad.pretrain.growth.stage import Growth, Setting, Stage, stage_ends, stage_shares

__all__ = ["stacking"]


def stacking(config: GrowthConfig, setting: Setting) -> Growth:
    """The stages of progressive stacking.

    Raises:
        ConfigError: a stage has more than twice the layers of the one before, they do not end with
            the model's, or a stage gets no update.
    """
    counts = config.layers or _doubling(setting.layers)
    if counts[-1] != setting.layers:
        raise ConfigError(
            "growth.layers",
            f"expected the model's {setting.layers} in the last stage, got {counts}",
        )
    if any(count > 2 * below for below, count in pairwise(counts)):
        raise ConfigError(
            "growth.layers", f"expected at most twice as many per stage, got {counts}"
        )
    ends = stage_ends(stage_shares(config, len(counts)), setting.total_steps)
    stages = tuple(
        # Copies of the topmost layers; of all of them, where the number doubles.
        Stage(end, count, setting.max_seq_length, sources=tuple(range(2 * below - count, below)))
        if below
        else Stage(end, count, setting.max_seq_length)
        for (below, count), end in zip(pairwise([0, *counts]), ends, strict=True)
    )
    return Growth(stages, config.learning_rate)


def _doubling(layers: int) -> list[int]:
    """A quarter, a half and all of the layers, as far as they can be halved."""
    counts = [layers]
    while len(counts) < 3 and counts[0] % 2 == 0:
        counts.insert(0, counts[0] // 2)
    return counts
