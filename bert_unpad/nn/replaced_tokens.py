"""Replaced-token detection (ELECTRA; Clark et al., 2020, arXiv:2003.10555).

A small generator fills masks; its tokens are drawn from its logits and put in place of the masks. A
discriminator, the model that is wanted, says of each token whether it was replaced. The generator
learns masked tokens by itself: no gradient goes through what is drawn.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from bert_unpad import ops
from bert_unpad.batch import PackedInputs
from bert_unpad.batch.inputs import IGNORE
from bert_unpad.batch.rows import gather_rows
from bert_unpad.nn import weights
from bert_unpad.nn.config import EncoderConfig
from bert_unpad.nn.flops import Lengths
from bert_unpad.nn.pretraining import EncoderForPreTraining

_ROWS = 512  # whose probabilities are in memory at a time: 120 MB with 30,000 tokens
_OWN = "projection"  # what of the embeddings is not shared
_GENERATOR = "generator"  # folder of the generator's files


class ReplacedTokenPreTrainingOutput(NamedTuple):
    """Losses and correct predictions, summed over the batch; scalars on the device."""

    mlm_loss_sum: Tensor
    """fp32: the generator's cross-entropy in nats, summed over masked tokens with a label."""
    mlm_correct: Tensor
    """int64: the number of masked tokens that the generator has predicted right."""
    rtd_loss_sum: Tensor
    """fp32: the discriminator's binary cross-entropy in nats, summed over all tokens."""
    rtd_correct: Tensor
    """int64: the number of tokens of which the discriminator knew whether they were replaced."""


def generator_config(config: EncoderConfig, share: float) -> EncoderConfig:
    """The configuration of a generator for a discriminator.

    Args:
        config: of the discriminator.
        share: attention heads, and with them the width, and width of the feed-forward layers, as a
            share of the discriminator's; at least one head. The number of layers is the same.
    """
    heads = max(round(share * config.num_attention_heads), 1)
    hidden, width = heads * config.head_dim, config.embedding_width
    return dataclasses.replace(
        config,
        heads=("mlm",),
        num_attention_heads=heads,
        hidden_size=hidden,
        intermediate_size=max(round(share * config.intermediate_size), 1),
        embedding_size=None if width == hidden else width,
    )


class ReplacedTokenPreTraining(EncoderForPreTraining):
    """A discriminator with a generator, which share their embeddings and LayerNorm after them.

    `bert` and `cls` are the discriminator's. The widening of factorised embeddings is not shared.

    Args:
        config: of the discriminator; its heads become ("rtd",).
        generator: of the generator.

    Raises:
        ValueError: the embeddings have different sizes, or the generator has no mlm head.
    """

    def __init__(self, config: EncoderConfig, generator: EncoderConfig) -> None:
        for name in ("embedding_width", "vocab_size", "max_length", "type_vocab_size"):
            if getattr(config, name) != getattr(generator, name):
                raise ValueError(
                    f"generator: expected a {name} of {getattr(config, name)}, that of the "
                    f"discriminator, got {getattr(generator, name)}"
                )
        super().__init__(dataclasses.replace(config, heads=("rtd",)))
        self.generator = EncoderForPreTraining(generator)
        self.generator._require("mlm")
        # Not as submodules: each parameter has one name, and one place in a checkpoint.
        ours, theirs = self.bert.embeddings, self.generator.bert.embeddings
        for name, module in ours.named_children():
            if name != _OWN:
                delattr(theirs, name)
                object.__setattr__(theirs, name, module)

    def forward(  # type: ignore[override]
        self, inputs: PackedInputs, rng_keys: Tensor | None = None
    ) -> ReplacedTokenPreTrainingOutput:
        """Computes losses and correct predictions of one packed batch, as sums.

        Training draws tokens from PyTorch's default generator; evaluation draws the same ones for
        the same inputs.

        Args:
            inputs: T packed tokens, some of them masked.
            rng_keys: dropout keys of the discriminator, from `bert.draw_rng_keys`; None draws them.
        """
        generator, rows = self.generator, inputs.query_rows
        hidden = generator.bert(inputs, rows_only=True)
        logits = generator.cls.predictions(
            gather_rows(hidden, rows.mlm_rows), generator.word_embeddings
        )
        vocab_size = self.config.vocab_size
        drawn = self._draw(logits.detach()[:, :vocab_size])
        # Nothing else uses the logits after this, so their gradient may overwrite them.
        mlm_loss, mlm_correct = ops.masked_cross_entropy(
            logits, inputs.masked_labels, vocab_size=vocab_size, inplace_backward=True
        )
        detected = self.detect(*replace_tokens(inputs, drawn), rng_keys)
        return ReplacedTokenPreTrainingOutput(mlm_loss, mlm_correct, *detected)

    def fresh(self) -> ReplacedTokenPreTraining:
        """A model of the same two configurations, with fresh weights on the CPU."""
        return ReplacedTokenPreTraining(self.config, self.generator.config)

    def logits(self, inputs: PackedInputs, all_positions: bool = False) -> tuple[Tensor, None]:
        """Computes the generator's masked-token logits; see `EncoderForPreTraining.logits`."""
        logits, _ = self.generator.logits(inputs, all_positions)
        return logits, None

    def num_flops(self, lengths: Lengths, num_masked: int | None = None) -> int:
        """Counts the model FLOPs of a training step of both encoders."""
        both = super().num_flops(lengths, num_masked), self.generator.num_flops(lengths, num_masked)
        return sum(both)

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Writes the discriminator for Hugging Face, and the generator in the folder `generator`.

        See `weights.save`.
        """
        for model, folder in (
            (self._alone(self.config, self), Path(directory)),
            (self._alone(self.generator.config, self.generator), Path(directory) / _GENERATOR),
        ):
            weights.save(model, folder)

    @classmethod
    def from_pretrained(
        cls, directory: str | os.PathLike[str], *, strict: bool = True, **overrides
    ) -> ReplacedTokenPreTraining:
        """Reads what `save_pretrained` has written.

        Args:
            directory: the folder.
            strict: see `EncoderForPreTraining.from_pretrained`.
            overrides: fields of both configurations to replace, such as dropout rates.
        """
        folders = Path(directory), Path(directory) / _GENERATOR
        found = [
            EncoderForPreTraining.from_pretrained(folder, strict=strict, **overrides)
            for folder in folders
        ]
        model = cls(*(part.config for part in found))
        values = {f"{_GENERATOR}.{name}": value for name, value in found[1].state_dict().items()}
        values |= found[0].state_dict()
        model.load_state_dict({name: values[name] for name in model.state_dict()})
        return model

    # torch.compile would compile again for each number of parts, and knows no generators.
    @torch.compiler.disable
    def _draw(self, logits: Tensor) -> Tensor:
        """One token for each row: [rows, vocab_size] -> int64 [rows]."""
        rng = None if self.training else torch.Generator(logits.device).manual_seed(0)
        return sample_tokens(logits, rng)

    def _alone(self, config: EncoderConfig, part: EncoderForPreTraining) -> EncoderForPreTraining:
        """One of the two as a model of its own, on the same memory."""
        values = {
            f"bert.embeddings.{name}": value
            for name, value in self.bert.embeddings.state_dict().items()
            if not name.startswith(f"{_OWN}.")
        }
        with torch.device("meta"):
            alone = EncoderForPreTraining(config)
        values |= part.state_dict()
        names = alone.state_dict().keys()
        alone.load_state_dict({name: values[name] for name in names}, assign=True)
        return alone


@torch.no_grad()
def sample_tokens(logits: Tensor, rng: torch.Generator | None = None) -> Tensor:
    """Draws one token for each row from softmax(logits).

    By inversion in fp64: the first token up to which the probabilities add up to more than a
    uniform random number.

    Args:
        logits: [rows, vocab_size].
        rng: generator of the device; None for PyTorch's default one.

    Returns:
        Ids, int64 [rows].
    """
    draws = torch.rand(len(logits), 1, dtype=torch.float64, device=logits.device, generator=rng)
    found = []
    for part, draw in zip(logits.split(_ROWS), draws.split(_ROWS), strict=True):
        sums = part.double().softmax(-1).cumsum(-1)
        found.append(torch.searchsorted(sums, draw * sums[:, -1:], right=True))
    # Without a bound, logits that are not finite would give ids outside the vocabulary.
    return torch.cat(found).squeeze(-1).clamp_(max=logits.shape[-1] - 1)


def replace_tokens(inputs: PackedInputs, drawn: Tensor) -> tuple[PackedInputs, Tensor]:
    """Puts drawn tokens in place of masks.

    Args:
        inputs: T packed tokens, M of them masked.
        drawn: int64 [M], ids to put there. Where a masked token has no label it stays as it is.

    Returns:
        The inputs of a discriminator; and int64 [T]: 1 where a token is not the original one (a
        drawn token may be), otherwise 0.
    """
    labels = inputs.masked_labels
    known = labels != IGNORE
    places = inputs.masked_positions
    ids = inputs.input_ids.clone()
    ids[places] = torch.where(known, drawn, ids[places])
    replaced = torch.zeros_like(ids)
    replaced[places] = (known & (drawn != labels)).long()
    return dataclasses.replace(inputs, input_ids=ids), replaced
