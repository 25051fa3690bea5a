"""Word, position and token type embeddings of packed tokens: one fused operator.

Mixed precision starts here: parameters keep their own dtype (fp32), the output of this layer has
the compute dtype, and every later layer computes in the dtype of its input.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bert_unpad import ops
from bert_unpad.batch import PackedInputs
from bert_unpad.nn.config import EncoderConfig
from bert_unpad.nn.positions import sequence_positions


class Embeddings(nn.Module):
    """dropout(LayerNorm(word + position + token type)), for real tokens only.

    With `embedding_size`, a linear layer brings the result to the width of the hidden states.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        width = config.embedding_width
        self.word_embeddings = nn.Embedding(config.padded_vocab_size, width)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, width)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, width)
        self.LayerNorm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.projection: nn.Linear | None = None
        if config.embedding_size is not None:
            self.projection = nn.Linear(width, config.hidden_size)
        self.position_offset = config.position_offset
        self.dropout_p = config.rate("embedding_dropout_prob")

    def forward(self, inputs: PackedInputs, rng: Tensor | None = None) -> Tensor:
        """Embeds the tokens.

        Args:
            inputs: T packed tokens. Where there is one token type only, all tokens have it.
            rng: the dropout key, int64 [2]; None draws one.

        Returns:
            Hidden states [T, hidden], in autocast's dtype if autocast is on, otherwise in the
            parameters' dtype.

        Raises:
            ValueError: a sequence has more tokens than there are positions.
        """
        batch = inputs.batch
        limit = self.position_embeddings.num_embeddings - self.position_offset
        if batch.seqlen > limit:
            less = f" - {self.position_offset}" if self.position_offset else ""
            raise ValueError(
                f"inputs: expected sequences of at most max_position_embeddings{less} = {limit} "
                f"tokens, got {batch.seqlen}"
            )
        positions, token_types = batch.position_ids, inputs.token_type_ids
        if self.position_offset:
            positions = sequence_positions(batch) + self.position_offset
        if self.token_type_embeddings.num_embeddings == 1:
            token_types = torch.zeros_like(token_types)
        x = ops.embedding_layer_norm(
            inputs.input_ids,
            positions,
            token_types,
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
        if self.projection is None:
            return x
        return ops.linear(x, self.projection.weight, self.projection.bias)

    def _compute_dtype(self) -> torch.dtype:
        weight = self.word_embeddings.weight
        kind = weight.device.type
        # The meta device, on which the model runs without memory, has no autocast.
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
        return weight.dtype
