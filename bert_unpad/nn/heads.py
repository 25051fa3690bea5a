"""What stands on the encoder in pretraining: pooler, masked-token head, next-sentence head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bert_unpad import ops
from bert_unpad.nn.config import BertConfig

__all__ = ["BertPooler", "BertPreTrainingHeads", "MlmHead", "MlmTransform"]


class BertPooler(nn.Module):
    """tanh(dense(x)) of the first token of a sequence."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """First tokens [N, hidden] -> [N, hidden]."""
        return torch.tanh(ops.linear(x, self.dense.weight, self.dense.bias))


class MlmTransform(nn.Module):
    """LayerNorm(gelu(dense(x)))."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.approximate = config.gelu_approximate

    def forward(self, x: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, hidden]."""
        x = ops.linear(x, self.dense.weight)
        x = ops.bias_gelu(x, self.dense.bias, approximate=self.approximate)
        norm = self.LayerNorm
        return ops.dropout_add_layer_norm(x, None, norm.weight, norm.bias, eps=norm.eps)


class MlmHead(nn.Module):
    """Logits over the vocabulary, with the word embedding as the decoder's weight."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.transform = MlmTransform(config)
        self.bias = nn.Parameter(torch.zeros(config.padded_vocab_size))

    def forward(self, x: Tensor, word_embeddings: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, padded_vocab_size]; the loss leaves out the padded columns.

        Args:
            x: hidden states.
            word_embeddings: [padded_vocab_size, hidden].
        """
        return ops.linear(self.transform(x), word_embeddings, self.bias)


class BertPreTrainingHeads(nn.Module):
    """The heads that are not part of the bare model, under Hugging Face's name `cls`."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.predictions = MlmHead(config)
        self.seq_relationship = nn.Linear(config.hidden_size, 2)

    def next_sentence(self, pooled: Tensor) -> Tensor:
        """Pooled first tokens [N, hidden] -> logits [N, 2] (0 = is next, 1 = random)."""
        return ops.linear(pooled, self.seq_relationship.weight, self.seq_relationship.bias)
