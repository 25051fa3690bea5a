"""Short sequences first, then long ones, in one run: Devlin et al. (2019, arXiv:1810.04805, A.2).

Attention costs the square of the length, and most of what a model learns it learns from short
sequences. Each stage has its own data, made of the same documents with the same vocabulary.
"""

from __future__ import annotations

from bert_unpad.pretrain.config import ConfigError, GrowthConfig
from bert_unpad.pretrain.growth.stage import Growth, Setting, Stage, stage_ends, stage_shares

__all__ = ["lengths"]


def lengths(config: GrowthConfig, setting: Setting) -> Growth:
    """One stage for each length.

    Raises:
        ConfigError: they do not end with that of the data, or a stage gets no update.
    """
    longest = config.lengths
    if not longest or longest[-1] != setting.max_seq_length:
        raise ConfigError(
            "growth.lengths",
            f"expected data.max_seq_length, {setting.max_seq_length}, as the last, got {longest}",
        )
    ends = stage_ends(stage_shares(config, len(longest)), setting.total_steps)
    stages = tuple(
        Stage(end, setting.layers, length) for end, length in zip(ends, longest, strict=True)
    )
    return Growth(stages, config.learning_rate)
