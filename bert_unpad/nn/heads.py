"""The heads on top of the encoder in pretraining; `EncoderConfig.heads` says which a model has."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bert_unpad import ops
from bert_unpad.nn.config import EncoderConfig


class Pooler(nn.Module):
    """tanh(dense(x)) of the first token of each sequence."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Pools the hidden states of first tokens: [N, hidden] -> [N, hidden]."""
        return torch.tanh(ops.linear(x, self.dense.weight, self.dense.bias))


class MlmTransform(nn.Module):
    """LayerNorm(gelu(dense(x))), the first part of the masked-token head."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        width = config.embedding_width
        self.dense = nn.Linear(config.hidden_size, width)
        self.LayerNorm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.approximate = config.head_gelu_approximate

    def forward(self, x: Tensor) -> Tensor:
        """Transforms hidden states: [rows, hidden] -> [rows, embedding width]."""
        x = ops.linear(x, self.dense.weight)
        x = ops.bias_gelu(x, self.dense.bias, approximate=self.approximate)
        norm = self.LayerNorm
        return ops.dropout_add_layer_norm(x, None, norm.weight, norm.bias, eps=norm.eps)


class MlmHead(nn.Module):
    """The masked-token head: logits over the vocabulary, decoded by the word embedding."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.transform = MlmTransform(config)
        self.bias = nn.Parameter(torch.zeros(config.padded_vocab_size))

    def forward(self, x: Tensor, word_embeddings: Tensor) -> Tensor:
        """Computes the logits.

        Args:
            x: hidden states, [rows, hidden].
            word_embeddings: the decoder's weight, [padded_vocab_size, embedding width].

        Returns:
            Logits, [rows, padded_vocab_size]; the loss ignores the padded columns.
        """
        return ops.linear(self.transform(x), word_embeddings, self.bias)


class SentenceHead(nn.Linear):
    """A linear layer whose weights may stay fp32."""

    def forward(self, x: Tensor) -> Tensor:
        """Computes logits of a relation of two sentences: [N, hidden] -> [N, 2]."""
        return ops.linear(x, self.weight, self.bias)


class ReplacedTokenHead(nn.Module):
    """ELECTRA's discriminator (Clark et al., 2020, arXiv:2003.10555): one logit per token."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.dense_prediction = nn.Linear(config.hidden_size, 1)
        self.approximate = config.gelu_approximate

    def forward(self, x: Tensor) -> Tensor:
        """Computes the logits that tokens are replaced: [rows, hidden] -> [rows]."""
        x = ops.linear(x, self.dense.weight)
        x = ops.bias_gelu(x, self.dense.bias, approximate=self.approximate)
        last = self.dense_prediction
        return ops.linear(x, last.weight, last.bias).squeeze(-1)


class PreTrainingHeads(nn.Module):
    """The heads of one model, which Hugging Face's BERT names `cls`."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        if "mlm" in config.heads:
            self.predictions = MlmHead(config)
        if "nsp" in config.heads:
            self.seq_relationship = SentenceHead(config.hidden_size, 2)
        if "rtd" in config.heads:
            self.detector = ReplacedTokenHead(config)

    def next_sentence(self, pooled: Tensor) -> Tensor:
        """Computes sentence logits [N, 2] (0 = is next, or in order) of pooled [N, hidden]."""
        return self.seq_relationship(pooled)
