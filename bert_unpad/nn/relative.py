"""What attention adds to its scores by the distance of two tokens: T5's and DeBERTa's ways."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from bert_unpad import ops
from bert_unpad.nn.config import EncoderConfig
from bert_unpad.nn.norms import normalise
from bert_unpad.nn.rng import keyed_dropout


class RelativeBias(nn.Embedding):
    """A number for each bucket of distances and head, the same in all layers (T5, MPNet)."""

    buckets: Tensor

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config.relative_buckets, config.num_attention_heads)
        buckets = ops.t5_buckets(config.relative_buckets, config.max_relative_positions)
        self.register_buffer("buckets", buckets, persistent=False)

    def forward(self) -> ops.PositionBias:  # type: ignore[override]
        """What attention adds in every layer."""
        return ops.PositionBias(self.buckets, table=self.weight)


class RelativeEmbeddings(nn.Embedding):
    """An embedding for each bucket of distances, which all layers project (DeBERTa)."""

    buckets: Tensor

    def __init__(self, config: EncoderConfig) -> None:
        span = config.relative_buckets or config.max_relative_positions
        super().__init__(2 * span, config.hidden_size)
        self.LayerNorm: nn.LayerNorm | None = None
        if config.relative_norm:
            self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        buckets = ops.deberta_buckets(config.max_relative_positions, config.relative_buckets or -1)
        self.register_buffer("buckets", buckets, persistent=False)

    def forward(self, dtype: torch.dtype) -> Tensor:  # type: ignore[override]
        """The embeddings, [buckets, hidden]."""
        x = self.weight.to(dtype)
        return x if self.LayerNorm is None else normalise(self.LayerNorm, x)


class DisentangledBias(nn.Module):
    """Content-to-position and position-to-content scores of one layer (arXiv:2006.03654)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.terms, self.shared = config.relative_terms, config.relative_projections == "shared"
        self.dropout_p = config.hidden_dropout_prob
        width = config.num_attention_heads * config.head_dim
        if not self.shared:
            for term in self.terms:
                self.add_module(_PROJECTIONS[term], nn.Linear(config.hidden_size, width))

    def forward(
        self,
        embeddings: Tensor,
        buckets: Tensor,
        q: Tensor,
        k: Tensor,
        qkv: nn.Linear,
        scale: float,
        rng: Tensor | None,
    ) -> ops.PositionBias:
        """Computes what attention adds.

        Args:
            embeddings: of distances, [buckets, hidden], of the data's dtype.
            buckets: of each distance; see `ops.PositionBias`.
            q: queries, [query tokens, heads, head_dim].
            k: keys, [key tokens, heads, head_dim].
            qkv: the layer's projection of hidden states.
            scale: factor of the scores.
            rng: the key of the embeddings' dropout, int64 [2]; None draws one.
        """
        if self.training and self.dropout_p:
            embeddings = keyed_dropout(embeddings, self.dropout_p, rng)
        width = q.shape[1] * q.shape[2]
        projected: dict[str, Tensor] = {}
        for term, part in (("c2p", 1), ("p2c", 0)):
            if term not in self.terms:
                continue
            if self.shared:
                rows = slice(part * width, (part + 1) * width)
                weight, bias = qkv.weight[rows], qkv.bias[rows]
            else:
                projection = getattr(self, _PROJECTIONS[term])
                weight, bias = projection.weight, projection.bias
            projected[term] = ops.linear(embeddings, weight, bias)
        return disentangled_bias(buckets, q, k, projected, scale)


def disentangled_bias(
    buckets: Tensor, q: Tensor, k: Tensor, projected: Mapping[str, Tensor], scale: float
) -> ops.PositionBias:
    """DeBERTa's scores of contents and distances (arXiv:2006.03654).

    Args:
        buckets: of each distance; see `ops.PositionBias`.
        q: queries, [query tokens, heads, head_dim].
        k: keys, [key tokens, heads, head_dim].
        projected: embeddings of distances as keys, "c2p", and as queries, "p2c", or one of the two;
            [buckets, heads * head_dim].
        scale: factor of the scores.
    """
    scores = {}
    for term, content in (("c2p", q), ("p2c", k)):
        if (place := projected.get(term)) is not None:
            place = place.view(-1, *q.shape[1:]).permute(1, 2, 0).to(content.dtype)
            # [heads, tokens, buckets], and its view with tokens first.
            scores[term] = ((content.transpose(0, 1) * scale) @ place).transpose(0, 1)
    return ops.PositionBias(buckets, query=scores.get("c2p"), key=scores.get("p2c"))


# Of a bucket's embedding, where the projections are not those of queries and keys.
_PROJECTIONS = {"c2p": "pos_key_proj", "p2c": "pos_query_proj"}
