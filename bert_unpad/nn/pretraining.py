"""An encoder with its pretraining heads, on packed tokens from the embeddings to the losses.

The losses of masked tokens and of sentences need only the hidden states of masked tokens and of the
first token of each sequence. So training computes the last layer for those rows only (`QueryRows`),
and logits for masked tokens only. Losses are sums. The caller divides them by the counts of the
global batch, so that the gradients of ranks with unequal numbers of tokens add up to the gradient
of that batch.
"""

from __future__ import annotations

import dataclasses
import math
import os
import tempfile
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert_unpad import ops
from bert_unpad.batch import PackedInputs
from bert_unpad.batch.inputs import IGNORE
from bert_unpad.batch.rows import gather_rows, scatter_rows
from bert_unpad.nn import weights
from bert_unpad.nn.attention import OutputBlock
from bert_unpad.nn.config import EncoderConfig
from bert_unpad.nn.embeddings import Embeddings
from bert_unpad.nn.encoder import Encoder
from bert_unpad.nn.flops import Lengths, training_flops
from bert_unpad.nn.heads import MlmTransform, Pooler, PreTrainingHeads
from bert_unpad.nn.rng import draw_rng_keys, keyed_dropout


@torch.no_grad()
def initialize(module: nn.Module, config: EncoderConfig) -> None:
    """Draws weights from a normal distribution; sets biases to 0 and norms to 1 and 0."""
    small: set[nn.Module] = set()
    if config.scaled_initializer:
        ends = (part for part in module.modules() if isinstance(part, OutputBlock | MlmTransform))
        small = {part.dense for part in ends}
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            layers = len(config.layer_order) if part in small else 0.5
            std = config.initializer_range / math.sqrt(2 * layers)
            if (factor := config.initializer_cutoff_factor) is None:
                part.weight.normal_(0.0, std)
            else:
                nn.init.trunc_normal_(part.weight, 0.0, std, -factor * std, factor * std)
        if isinstance(part, nn.Linear) and part.bias is not None:
            part.bias.zero_()
        if isinstance(part, nn.LayerNorm | nn.RMSNorm):
            part.reset_parameters()


class PreTrainingOutput(NamedTuple):
    """Losses and correct predictions, summed over the batch; scalars on the device.

    Sums of a head that the model does not have are 0.
    """

    mlm_loss_sum: Tensor
    """fp32: cross-entropy in nats, summed over masked tokens with a label."""
    mlm_correct: Tensor
    """int64: the number of masked tokens that were predicted right."""
    nsp_loss_sum: Tensor
    """fp32: cross-entropy in nats, summed over sequences with a next-sentence label."""
    nsp_correct: Tensor
    """int64: the number of sequences whose next-sentence label was predicted right."""


class ReplacedTokenOutput(NamedTuple):
    """The discriminator's loss and correct predictions, summed over tokens; scalars."""

    rtd_loss_sum: Tensor
    """fp32: binary cross-entropy in nats, summed over tokens with a label."""
    rtd_correct: Tensor
    """int64: the number of tokens whose label was predicted right."""


class EncoderModel(nn.Module):
    """Embeddings, encoder, and the pooler if there is an nsp head."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.encoder = Encoder(config)
        if "nsp" in config.heads:
            self.pooler = Pooler(config)

    def draw_rng_keys(self, device: torch.device) -> Tensor | None:
        """Draws the dropout keys of one forward pass, which determine all its dropout masks.

        Returns:
            int64 [keys, 2], from PyTorch's default generator of the device. None without drawing
            anything if the model has no dropout or is in evaluation mode.
        """
        if not (self.training and self.config.has_dropout):
            return None
        return draw_rng_keys(self._num_keys, device)

    @property
    def _num_keys(self) -> int:
        """How many dropout keys embeddings, layers and pooled tokens with dropout take."""
        pooled = "nsp" in self.config.heads and self.config.classifier_dropout_prob > 0
        return 1 + self.config.keys_per_layer * len(self.encoder.layer_order) + pooled

    def forward(
        self, inputs: PackedInputs, rows_only: bool = False, rng_keys: Tensor | None = None
    ) -> Tensor:
        """Computes the hidden states of the last layer.

        Args:
            inputs: T packed tokens.
            rows_only: compute the last layer for `inputs.query_rows` only.
            rng_keys: dropout keys from `draw_rng_keys`; None draws them.

        Returns:
            Hidden states, [T, hidden], or [Q, hidden] with `rows_only`.
        """
        if rng_keys is None:
            rng_keys = self.draw_rng_keys(inputs.device)
        keys = (None,) * self._num_keys if rng_keys is None else rng_keys.unbind()
        frozen = self.training and self.encoder.frozen_layers > 0
        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
            x = self.embeddings(inputs, keys[0])
        return self.encoder(x, inputs.batch, inputs.query_rows if rows_only else None, keys[1:])

    def pool(self, first: Tensor, rng_keys: Tensor | None = None) -> Tensor:
        """Pools the hidden states of first tokens, with dropout: [N, hidden] -> [N, hidden].

        Args:
            first: hidden states of the first token of each sequence.
            rng_keys: those of `forward`, of which the last one is used; None draws one.
        """
        p = self.config.classifier_dropout_prob if self.training else 0.0
        x = self.pooler(first)
        return keyed_dropout(x, p, None if rng_keys is None else rng_keys[-1]) if p else x


class EncoderForPreTraining(nn.Module):
    """An encoder with the heads of its configuration.

    Parameters have the names of Hugging Face's BERT in every family, with two differences: queries,
    keys and values are one `attention.self.qkv`, and the word embedding has padding rows, which
    stay zero. Saved files have the names of the model's own family.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.bert = EncoderModel(config)
        self.cls = PreTrainingHeads(config)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws weights with `initializer_range`; sets biases to 0 and norms to 1 and 0."""
        initialize(self, self.config)
        for name, parameter in self.named_parameters():
            if name in weights.VOCAB_PADDED:
                parameter[self.config.vocab_size :].zero_()
            if name == "cls.predictions.bias":
                parameter.zero_()

    def fresh(self) -> EncoderForPreTraining:
        """A model of the same configuration, with fresh weights on the CPU."""
        return EncoderForPreTraining(self.config)

    @property
    def word_embeddings(self) -> Tensor:
        """The word embedding, [padded_vocab_size, embedding width]; if tied, the decoder's too."""
        return self.bert.embeddings.word_embeddings.weight

    def forward(self, inputs: PackedInputs, rng_keys: Tensor | None = None) -> PreTrainingOutput:
        """Computes losses and correct predictions of one packed batch, as sums.

        A batch without tokens, masked tokens or next-sentence labels gives sums of 0, and
        gradients of 0 for every parameter.

        Args:
            inputs: T packed tokens.
            rng_keys: dropout keys from `bert.draw_rng_keys`; None draws them.

        Raises:
            ValueError: the model has no mlm head.
        """
        self._require("mlm")
        rows = inputs.query_rows
        if rng_keys is None:
            rng_keys = self.bert.draw_rng_keys(inputs.device)
        hidden = self.bert(inputs, rows_only=True, rng_keys=rng_keys)
        masked = gather_rows(hidden, rows.mlm_rows)
        # Nothing else uses the logits, so their gradient may overwrite them.
        mlm_loss, mlm_correct = ops.masked_cross_entropy(
            self.cls.predictions(masked, self.word_embeddings),
            inputs.masked_labels,
            vocab_size=self.config.vocab_size,
            inplace_backward=True,
        )
        if "nsp" in self.config.heads:
            first = gather_rows(hidden, rows.cls_rows)
            nsp_loss, nsp_correct = ops.masked_cross_entropy(
                self.cls.next_sentence(self.bert.pool(first, rng_keys)), rows.cls_labels
            )
        else:
            nsp_loss, nsp_correct = torch.zeros_like(mlm_loss), torch.zeros_like(mlm_correct)
        return PreTrainingOutput(mlm_loss, mlm_correct, nsp_loss, nsp_correct)

    def detect(
        self, inputs: PackedInputs, replaced: Tensor, rng_keys: Tensor | None = None
    ) -> ReplacedTokenOutput:
        """Computes the loss of replaced-token detection, as sums over tokens.

        Args:
            inputs: T packed tokens, some of them replaced.
            replaced: int64 [T]: 1 where the token is not the original one, 0 where it is, -100
                where it does not count.
            rng_keys: dropout keys from `bert.draw_rng_keys`; None draws them.

        Raises:
            ValueError: the model has no rtd head, or `replaced` has another shape.
        """
        if replaced.shape != inputs.input_ids.shape:
            raise ValueError(
                f"replaced: expected shape {list(inputs.input_ids.shape)}, got "
                f"{list(replaced.shape)}"
            )
        logits = self.detector_logits(inputs, rng_keys).float()
        counts = replaced != IGNORE
        losses = F.binary_cross_entropy_with_logits(logits, replaced.float(), reduction="none")
        correct = (logits > 0) == (replaced == 1)
        return ReplacedTokenOutput(torch.where(counts, losses, 0.0).sum(), (correct & counts).sum())

    def encode(self, inputs: PackedInputs) -> Tensor:
        """Computes the hidden states of the last layer for every token, [T, hidden]."""
        return self.bert(inputs)

    def logits(
        self, inputs: PackedInputs, all_positions: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Computes logits, for evaluation and for filling masks.

        Args:
            inputs: T packed tokens in B sequences, M of them masked.
            all_positions: compute logits of every token, not only of the masked ones.

        Returns:
            Masked-token logits [M, vocab_size] (or [T, vocab_size]), and next-sentence logits
            [B, 2] (0 = is next, 1 = random), which are 0 for an empty sequence; None without an nsp
            head.

        Raises:
            ValueError: the model has no mlm head.
        """
        self._require("mlm")
        rows = inputs.query_rows
        hidden = self.bert(inputs, rows_only=not all_positions)
        tokens = hidden if all_positions else gather_rows(hidden, rows.mlm_rows)
        mlm = self.cls.predictions(tokens, self.word_embeddings)[:, : self.config.vocab_size]
        if "nsp" not in self.config.heads:
            return mlm, None
        first = gather_rows(hidden, rows.cls_positions if all_positions else rows.cls_rows)
        nsp = self.cls.next_sentence(self.bert.pool(first))
        return mlm, scatter_rows(nsp, rows.cls_sequences, inputs.batch.batch_size)

    def detector_logits(self, inputs: PackedInputs, rng_keys: Tensor | None = None) -> Tensor:
        """Computes the logits that tokens are replaced, [T].

        Raises:
            ValueError: the model has no rtd head.
        """
        self._require("rtd")
        return self.cls.detector(self.bert(inputs, rng_keys=rng_keys))

    def _require(self, head: str) -> None:
        if head not in self.config.heads:
            raise ValueError(f"heads: expected a model with {head}, got {self.config.heads!r}")

    def num_flops(self, lengths: Lengths, num_masked: int | None = None) -> int:
        """Counts the model FLOPs of a training step's forward and backward pass.

        Layers below `encoder.frozen_layers` count their forward pass only, and layers that are not
        in `encoder.active_layers` do not count; see `bert_unpad.nn.flops`.
        """
        encoder = self.bert.encoder
        active = encoder.active_layers
        return training_flops(
            self.config,
            lengths,
            num_masked,
            layers=[i for i in range(len(encoder.layer_order)) if active is None or active[i]],
            frozen_layers=encoder.frozen_layers,
            frozen_decoder=not self.word_embeddings.requires_grad,
        )

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Writes config.json and model.safetensors for Hugging Face; see `weights.save`."""
        weights.save(self, directory)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        commit_message: str = "Upload model",
    ) -> str:
        """Uploads what `save_pretrained` writes to the Hugging Face Hub, as transformers does.

        Args:
            repo_id: name of the repository, made if it does not exist.
            private: whether it is made private; by default what the account says.
            token: the account's; by default the one of `hf auth login`.
            commit_message: of the upload.

        Returns:
            The URL of the commit.
        """
        from huggingface_hub import HfApi

        api = HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            commit = api.upload_folder(
                repo_id=repo_id, folder_path=folder, commit_message=commit_message
            )
        return commit.commit_url

    @classmethod
    def from_pretrained(
        cls, directory: str | os.PathLike[str], *, strict: bool = True, **overrides
    ) -> EncoderForPreTraining:
        """Reads a directory with a model of Hugging Face; see `weights.load`.

        Args:
            directory: folder with config.json and model.safetensors (or its shards and their
                index).
            strict: raise an error if tensors are missing or unexpected. Otherwise log them as a
                warning; missing tensors keep their initial values.
            overrides: fields of the configuration to replace, for example a dropout rate, or
                `heads`.
        """
        config = weights.read_config(directory, overrides)
        return weights.load(lambda: cls(config), directory, strict=strict)


class BertForPreTraining(EncoderForPreTraining):
    """An encoder with the heads of Devlin et al. (2019, arXiv:1810.04805): mlm and nsp.

    Those heads are there whatever the configuration or a file says.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(dataclasses.replace(config, heads=("mlm", "nsp")))
