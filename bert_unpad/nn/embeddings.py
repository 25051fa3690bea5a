"""Word, position and token type embeddings of packed tokens: one fused operator.

Mixed precision starts here: parameters keep their own dtype (fp32), the output of this layer has
the compute dtype, and every later layer computes in the dtype of its input.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bert_unpad import ops
from bert_unpad.batch import PackedInputs
from bert_unpad.nn.config import BertConfig


class BertEmbeddings(nn.Module):
    """dropout(LayerNorm(word + position + token type)), for real tokens only."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.word_embeddings = nn.Embedding(config.padded_vocab_size, hidden)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, hidden)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, hidden)
        self.LayerNorm = nn.LayerNorm(hidden, eps=config.layer_norm_eps)
        self.dropout_p = config.hidden_dropout_prob

    def forward(self, inputs: PackedInputs, rng: Tensor | None = None) -> Tensor:
        """Embeds the tokens.

        Args:
            inputs: T packed tokens.
            rng: the dropout key, int64 [2]; None draws one.

        Returns:
            Hidden states [T, hidden], in autocast's dtype if autocast is on, otherwise in the
            parameters' dtype.

        Raises:
            ValueError: the batch is longer than max_position_embeddings.
        """
        batch = inputs.batch
        limit = self.position_embeddings.num_embeddings
        if batch.seqlen > limit:
            raise ValueError(
                f"inputs: expected sequences of at most max_position_embeddings = {limit} tokens, "
                f"got {batch.seqlen}"
            )
        return ops.embedding_layer_norm(
            inputs.input_ids,
            batch.position_ids,
            inputs.token_type_ids,
            self.word_embeddings.weight,
            self.position_embeddings.weight,
            self.token_type_embeddings.weight,
            self.LayerNorm.weight,
            self.LayerNorm.bias,
            p=self.dropout_p if self.training else 0.0,
            eps=self.LayerNorm.eps,
            out_dtype=self._compute_dtype(),
            rng=rng,
        )

    def _compute_dtype(self) -> torch.dtype:
        weight = self.word_embeddings.weight
        kind = weight.device.type
        # The meta device, on which the model runs without memory, has no autocast.
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
        return weight.dtype
