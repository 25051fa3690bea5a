"""BERT with its two pretraining tasks, on packed tokens from the embeddings to the loss.

The loss needs the hidden states of masked tokens and of the first token of each sequence and no
others, so training computes the last layer for those rows alone (`QueryRows`), and logits for
masked tokens alone. Losses are sums: the caller divides by the counts of the global batch, so that
ranks with unequal numbers of tokens still add up to the gradient of that batch.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bert_unpad import ops
from bert_unpad.batch import PackedInputs
from bert_unpad.batch.rows import gather_rows, scatter_rows
from bert_unpad.nn import weights
from bert_unpad.nn.config import BertConfig
from bert_unpad.nn.embeddings import BertEmbeddings
from bert_unpad.nn.encoder import BertEncoder, BertLayer
from bert_unpad.nn.flops import Lengths, training_flops
from bert_unpad.nn.heads import BertPooler, BertPreTrainingHeads
from bert_unpad.nn.rng import draw_rng_keys

__all__ = ["BertForPreTraining", "BertModel", "PreTrainingOutput", "initialize"]


@torch.no_grad()
def initialize(module: nn.Module, std: float) -> None:
    """Draws weights from a normal distribution; biases become 0, LayerNorms 1 and 0."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            part.weight.normal_(0.0, std)
        if isinstance(part, nn.Linear):
            part.bias.zero_()
        if isinstance(part, nn.LayerNorm):
            part.reset_parameters()


class PreTrainingOutput(NamedTuple):
    """Sums over the batch, as scalars on the device."""

    mlm_loss_sum: Tensor
    """fp32: cross-entropy in nats, summed over masked tokens with a label."""
    mlm_correct: Tensor
    """int64: how many of them were predicted right."""
    nsp_loss_sum: Tensor
    """fp32: cross-entropy in nats, summed over sequences with a next-sentence label."""
    nsp_correct: Tensor
    """int64: how many of them were predicted right."""


class BertModel(nn.Module):
    """Embeddings, encoder and pooler."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = BertEmbeddings(config)
        self.encoder = BertEncoder(config)
        self.pooler = BertPooler(config)

    def draw_rng_keys(self, device: torch.device) -> Tensor | None:
        """What all dropout masks of one forward pass are a pure function of.

        Returns:
            int64 [keys, 2], drawn from PyTorch's default generator of the device; None, and
            nothing is drawn, if no dropout is due.
        """
        config = self.config
        rates = config.hidden_dropout_prob, config.attention_probs_dropout_prob
        if not (self.training and any(rates)):
            return None
        return draw_rng_keys(1 + BertLayer.RNG_KEYS * len(self.encoder.layer), device)

    def forward(
        self, inputs: PackedInputs, rows_only: bool = False, rng_keys: Tensor | None = None
    ) -> Tensor:
        """Hidden states of the last layer.

        Args:
            inputs: T packed tokens.
            rows_only: compute the last layer for `inputs.query_rows` only.
            rng_keys: of the dropout masks, as `draw_rng_keys` makes them; None draws them.

        Returns:
            [T, hidden], or [Q, hidden] if `rows_only`.
        """
        if rng_keys is None:
            rng_keys = self.draw_rng_keys(inputs.device)
        count = 1 + BertLayer.RNG_KEYS * len(self.encoder.layer)
        keys = (None,) * count if rng_keys is None else rng_keys.unbind()
        frozen = self.training and self.encoder.frozen_layers > 0
        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
            x = self.embeddings(inputs, keys[0])
        return self.encoder(x, inputs.batch, inputs.query_rows if rows_only else None, keys[1:])


class BertForPreTraining(nn.Module):
    """BERT with masked-token and next-sentence heads (Devlin et al., 2019, arXiv:1810.04805).

    Parameters have Hugging Face's names, but for two things: queries, keys and values are one
    `attention.self.qkv`, and the word embedding has padded rows (zero, and never trained).
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.bert = BertModel(config)
        self.cls = BertPreTrainingHeads(config)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Weights from a normal distribution (initializer_range), biases 0, LayerNorm 1 and 0."""
        initialize(self, self.config.initializer_range)
        self.word_embeddings[self.config.vocab_size :].zero_()
        self.cls.predictions.bias.zero_()

    @property
    def word_embeddings(self) -> Tensor:
        """The word embedding, which is the decoder's weight too: [padded_vocab_size, hidden]."""
        return self.bert.embeddings.word_embeddings.weight

    def forward(self, inputs: PackedInputs, rng_keys: Tensor | None = None) -> PreTrainingOutput:
        """Losses and correct predictions of one packed batch, as sums.

        A batch without tokens, masked tokens or next-sentence labels gives sums of 0, and
        gradients of 0 for every parameter.

        Args:
            inputs: T packed tokens.
            rng_keys: of the dropout masks, from `bert.draw_rng_keys`; None draws them.
        """
        rows = inputs.query_rows
        hidden = self.bert(inputs, rows_only=True, rng_keys=rng_keys)
        masked = gather_rows(hidden, rows.mlm_rows)
        first = gather_rows(hidden, rows.cls_rows)
        # The logits are this function's own, so their gradient may overwrite them.
        mlm_loss, mlm_correct = ops.masked_cross_entropy(
            self.cls.predictions(masked, self.word_embeddings),
            inputs.masked_labels,
            vocab_size=self.config.vocab_size,
            inplace_backward=True,
        )
        nsp_loss, nsp_correct = ops.masked_cross_entropy(
            self.cls.next_sentence(self.bert.pooler(first)), rows.cls_labels
        )
        return PreTrainingOutput(mlm_loss, mlm_correct, nsp_loss, nsp_correct)

    def encode(self, inputs: PackedInputs) -> Tensor:
        """Hidden states of the last layer for every token: [T, hidden]."""
        return self.bert(inputs)

    def logits(self, inputs: PackedInputs, all_positions: bool = False) -> tuple[Tensor, Tensor]:
        """Scores before the softmax, for evaluation and for filling masks.

        Args:
            inputs: T packed tokens in B sequences, M of them masked.
            all_positions: score every token, not only the masked ones.

        Returns:
            masked-token logits [M, vocab_size] (or [T, vocab_size]), and next-sentence logits
            [B, 2] (0 = is next, 1 = random), which are 0 for an empty sequence.
        """
        rows = inputs.query_rows
        hidden = self.bert(inputs, rows_only=not all_positions)
        tokens = hidden if all_positions else gather_rows(hidden, rows.mlm_rows)
        first = gather_rows(hidden, rows.cls_positions if all_positions else rows.cls_rows)
        mlm = self.cls.predictions(tokens, self.word_embeddings)
        nsp = self.cls.next_sentence(self.bert.pooler(first))
        nsp = scatter_rows(nsp, rows.cls_sequences, inputs.batch.batch_size)
        return mlm[:, : self.config.vocab_size], nsp

    def num_flops(self, lengths: Lengths, num_masked: int | None = None) -> int:
        """Model FLOPs of a forward and backward pass as training does it now.

        Layers that run forward only (`encoder.frozen_layers`) count as such, those left out
        (`encoder.kept`) not at all; see `bert_unpad.nn.flops`.
        """
        encoder = self.bert.encoder
        return training_flops(
            self.config,
            lengths,
            num_masked,
            layers=len(encoder.layer) if encoder.kept is None else sum(encoder.kept),
            frozen_layers=encoder.frozen_layers,
            frozen_decoder=not self.word_embeddings.requires_grad,
        )

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Writes config.json and model.safetensors for Hugging Face; see `weights.save`."""
        weights.save(self, directory)

    @classmethod
    def from_pretrained(
        cls, directory: str | os.PathLike[str], *, strict: bool = True, **overrides
    ) -> BertForPreTraining:
        """Reads a directory with a Hugging Face BERT; see `weights.load`.

        Args:
            directory: holds config.json and model.safetensors (or its shards and their index).
            strict: refuse a checkpoint that lacks tensors or has others; if not set, they are
                logged as a warning, and what is missing keeps its fresh initial value.
            overrides: fields of the configuration to replace, for example a dropout rate.
        """
        config = weights.read_config(directory, overrides)
        return weights.load(lambda: cls(config), directory, strict=strict)
