"""The heads on top of the encoder in pretraining: pooler, masked tokens, next sentence."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bert_unpad import ops
from bert_unpad.nn.config import BertConfig


class BertPooler(nn.Module):
    """tanh(dense(x)) of the first token of each sequence."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Pools the hidden states of first tokens: [N, hidden] -> [N, hidden]."""
        return torch.tanh(ops.linear(x, self.dense.weight, self.dense.bias))


class MlmTransform(nn.Module):
    """LayerNorm(gelu(dense(x))), the first part of the masked-token head."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.approximate = config.gelu_approximate

    def forward(self, x: Tensor) -> Tensor:
        """Transforms hidden states: [rows, hidden] -> [rows, hidden]."""
        x = ops.linear(x, self.dense.weight)
        x = ops.bias_gelu(x, self.dense.bias, approximate=self.approximate)
        norm = self.LayerNorm
        return ops.dropout_add_layer_norm(x, None, norm.weight, norm.bias, eps=norm.eps)


class MlmHead(nn.Module):
    """The masked-token head: logits over the vocabulary, decoded by the word embedding."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.transform = MlmTransform(config)
        self.bias = nn.Parameter(torch.zeros(config.padded_vocab_size))

    def forward(self, x: Tensor, word_embeddings: Tensor) -> Tensor:
        """Computes the logits.

        Args:
            x: hidden states, [rows, hidden].
            word_embeddings: the decoder's weight, [padded_vocab_size, hidden].

        Returns:
            Logits, [rows, padded_vocab_size]; the loss ignores the padded columns.
        """
        return ops.linear(self.transform(x), word_embeddings, self.bias)


class NextSentenceHead(nn.Linear):
    """A linear layer whose weights may stay fp32."""

    def forward(self, x: Tensor) -> Tensor:
        """Computes next-sentence logits: [N, hidden] -> [N, 2]."""
        return ops.linear(x, self.weight, self.bias)


class BertPreTrainingHeads(nn.Module):
    """The two pretraining heads, which Hugging Face's models name `cls`."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.predictions = MlmHead(config)
        self.seq_relationship = NextSentenceHead(config.hidden_size, 2)

    def next_sentence(self, pooled: Tensor) -> Tensor:
        """Computes next-sentence logits [N, 2] (0 = is next, 1 = random) of pooled [N, hidden]."""
        return self.seq_relationship(pooled)
