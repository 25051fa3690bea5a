"""The schedules of growth.

stacking: a trained model of L layers becomes one of 2 L, its layers twice over (Gong et al., 2019,
"Efficient Training of BERT by Progressively Stacking", ICML). All layers train in every stage. New
layers take the optimizer's states of those they are copies of along.

mslt: each stage trains the layers that it adds, and no others (Yang et al., 2020, "Progressively
Stacking 2.0: A Multi-stage Layerwise Training Method for BERT Training Speedup", arXiv:2011.13635).
The layers below run forward only, and only the layers being trained have gradients to exchange. New
layers are copies of those on top, with their optimizer states; the heads, and the word embedding as
the decoder, train in all stages. An optional last part of the run trains all layers together.

lengths: short sequences first, then long ones, in one run (Devlin et al., 2019, arXiv:1810.04805,
A.2). Attention costs the square of the length, and most of what a model learns it learns from short
sequences. Each stage has its own data, made of the same documents with the same vocabulary.
"""

from itertools import pairwise

from bert_unpad.pretrain.config import ConfigError, GrowthConfig
from bert_unpad.pretrain.growth.stage import Growth, Setting, Stage, stage_ends, stage_shares

_DEFAULT_STAGES = 4  # of mslt


def none(config: GrowthConfig, setting: Setting) -> Growth:
    """One stage that trains everything."""
    return Growth((Stage(setting.total_steps, setting.layers, setting.max_seq_length),))


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
