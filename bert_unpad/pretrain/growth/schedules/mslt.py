"""Multi-stage layerwise training: each stage trains the layers that it adds, and no others.

Yang et al. (2020), "Progressively Stacking 2.0: A Multi-stage Layerwise Training Method for BERT
Training Speedup" (arXiv:2011.13635). The layers below run forward only, and only the layers being
trained have gradients to exchange. New layers are copies of those on top, with their optimizer
states; the heads, and the word embedding as the decoder, train in all stages. An optional last part
of the run trains all layers together.
"""

from __future__ import annotations

from itertools import pairwise

from bert_unpad.pretrain.config import ConfigError, GrowthConfig
from bert_unpad.pretrain.growth.stage import Growth, Setting, Stage, stage_ends, stage_shares

__all__ = ["mslt"]

_DEFAULT_STAGES = 4


def mslt(config: GrowthConfig, setting: Setting) -> Growth:
    """The stages of multi-stage layerwise training.

    Raises:
        ConfigError: the stages do not end with the model's layers, or one gets no update.
    """
    parts = min(_DEFAULT_STAGES, setting.layers)
    counts = config.layers or [-(-setting.layers * (i + 1) // parts) for i in range(parts)]
    if counts[-1] != setting.layers:
        raise ConfigError(
            "growth.layers",
            f"expected the model's {setting.layers} in the last stage, got {counts}",
        )
    shares = list(stage_shares(config, len(counts)))
    joint = config.joint_share or 0.0
    ends = stage_ends([*shares, joint] if joint else shares, setting.total_steps)
    stages = []
    for (below, count), end in zip(pairwise([0, *counts]), ends, strict=False):
        added = count - below
        first = max(below - added, 0)  # of the layers copied, on top of which the new ones come
        copied = [first + i % (below - first) for i in range(added)] if below else []
        stages.append(
            Stage(
                end,
                count,
                setting.max_seq_length,
                frozen=below,
                sources=tuple(copied),
            )
        )
    if joint:
        stages.append(Stage(ends[-1], setting.layers, setting.max_seq_length))
    return Growth(tuple(stages), config.learning_rate)
