"""Word, position and token type embeddings of packed tokens.

Mixed precision starts here: parameters keep their own dtype (fp32), the output of this layer has
the compute dtype, and every later layer computes in the dtype of its input.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert_unpad import ops
from bert_unpad.batch import PackedInputs
from bert_unpad.nn.config import EncoderConfig
from bert_unpad.nn.norms import make_norm, normalise
from bert_unpad.nn.positions import sequence_of_tokens, sequence_positions
from bert_unpad.ops import matmul

# The share of tokens that ESM's training replaces by mask tokens: 15 % are chosen, 80 % of these.
_ESM_MASKED = 0.15 * 0.8


class Embeddings(nn.Module):
    """dropout(norm(word + position + token type)), of what the configuration has, for real tokens.

    One fused operator where the norm is a LayerNorm. With `embedding_size`, a linear layer brings
    the result to the width of the hidden states.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        width = config.embedding_width
        self.word_embeddings = nn.Embedding(config.padded_vocab_size, width)
        self.position_embeddings: nn.Embedding | None = None
        if config.learned_positions:
            self.position_embeddings = nn.Embedding(config.max_position_embeddings, width)
        self.token_type_embeddings: nn.Embedding | None = None
        if config.type_vocab_size:
            self.token_type_embeddings = nn.Embedding(config.type_vocab_size, width)
        self.LayerNorm = make_norm(config, width) if config.embedding_norm else None
        self.projection: nn.Linear | None = None
        if config.embedding_size is not None:
            self.projection = nn.Linear(width, config.hidden_size)
        self.position_offset = config.position_offset
        self.mask_token_id = config.mask_token_id if config.token_dropout else None
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
        if isinstance(self.LayerNorm, nn.LayerNorm) and self.mask_token_id is None:
            x = self._fused(inputs, self.LayerNorm, rng)
        else:
            x = self._words(inputs)
            for table, ids in (
                (self.position_embeddings, self._positions(inputs)),
                (self.token_type_embeddings, self._token_types(inputs)),
            ):
                x = x if table is None else x + F.embedding(ids, table.weight)
            x = x.to(self._compute_dtype())
            x = x if self.LayerNorm is None else normalise(self.LayerNorm, x)
        if self.projection is None:
            return x
        return ops.linear(x, self.projection.weight, self.projection.bias)

    def _fused(self, inputs: PackedInputs, norm: nn.LayerNorm, rng: Tensor | None) -> Tensor:
        words = self.word_embeddings.weight
        # A row of zeros stands for a table that the model does not have. It is no buffer, which DDP
        # would broadcast before every pass.
        positions, token_types = (
            words.new_zeros(1, words.shape[1]) if table is None else table.weight
            for table in (self.position_embeddings, self.token_type_embeddings)
        )
        return ops.embedding_layer_norm(
            inputs.input_ids,
            self._positions(inputs),
            self._token_types(inputs),
            words,
            positions,
            token_types,
            norm.weight,
            torch.zeros_like(norm.weight) if norm.bias is None else norm.bias,
            dropout_p=self.dropout_p if self.training else 0.0,
            eps=norm.eps,
            out_dtype=self._compute_dtype(),
            rng=rng,
        )

    def _words(self, inputs: PackedInputs) -> Tensor:
        ids, batch = inputs.input_ids, inputs.batch
        x = F.embedding(ids, self.word_embeddings.weight)
        if self.mask_token_id is None:
            return x
        is_mask = ids == self.mask_token_id
        sequence = sequence_of_tokens(batch)
        # In fp32: 16 bits cannot count so far.
        masks = x.new_zeros(batch.batch_size, dtype=torch.float32)
        masks = masks.index_add(0, sequence, is_mask.float())
        lengths = batch.cu_seqlens.diff().float()
        # Where all tokens are masks nothing is left to scale.
        left = (1 - masks / lengths.clamp(min=1)).clamp(min=torch.finfo(torch.float32).tiny)
        scale = (1 - _ESM_MASKED) / left[sequence]
        return x * torch.where(is_mask, 0.0, scale).unsqueeze(1).to(x.dtype)

    def _positions(self, inputs: PackedInputs) -> Tensor:
        """Rows of the position embedding, int64 [T]; zeros without one."""
        if self.position_embeddings is None:
            return torch.zeros_like(inputs.input_ids)
        batch = inputs.batch
        limit = self.position_embeddings.num_embeddings - self.position_offset
        if batch.seqlen > limit:
            less = f" - {self.position_offset}" if self.position_offset else ""
            raise ValueError(
                f"inputs: expected sequences of at most max_position_embeddings{less} = {limit} "
                f"tokens, got {batch.seqlen}"
            )
        if self.position_offset:
            return sequence_positions(batch) + self.position_offset
        return batch.position_ids

    def _token_types(self, inputs: PackedInputs) -> Tensor:
        """Rows of the token type embedding, int64 [T]; zeros where it has one row or none."""
        types = self.token_type_embeddings
        if types is None or types.num_embeddings == 1:
            return torch.zeros_like(inputs.token_type_ids)
        return inputs.token_type_ids

    def _compute_dtype(self) -> torch.dtype:
        weight = self.word_embeddings.weight
        kind = weight.device.type
        return torch.get_autocast_dtype(kind) if matmul.autocasts(kind) else weight.dtype
