"""What attention adds to its scores by the distance of two tokens, in models that do so.

A stack computes what all layers share once a call, and a layer makes its bias of it: MPNet a number
for each distance and head (T5's), DeBERTa-v2 and v3 scores of contents and distances.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from bert_unpad import ops
from bert_unpad.hf.plain_modules import dense, untouched
from bert_unpad.nn.relative import disentangled_bias


class Bias(Protocol):
    """What a layer's attention makes of distances, but for its queries and keys."""

    @property
    def scale(self) -> float | None:
        """The factor of scores; None: 1 / sqrt(head_dim)."""

    def of(self, q: Tensor, k: Tensor) -> ops.PositionBias | None:
        """What is added to the scores of q [Q, heads, head_dim] and k [K, heads, head_dim]."""


class Distances(Protocol):
    """How the layers of a family use distances."""

    def reason(self, stack: Any) -> str | None:
        """Why a stack of layers cannot run on packed tokens, or None."""

    def shared(self, stack: Any, x: Tensor) -> Any:
        """What the layers of a stack share, for hidden states x; None if distances do not count."""

    def bias(self, attention: Any, shared: Any) -> Bias:
        """What a layer makes of what its stack shares."""


class _Table(NamedTuple):
    """A number for each bucket and head."""

    found: ops.PositionBias
    scale: None = None

    def of(self, q: Tensor, k: Tensor) -> ops.PositionBias:
        return self.found


class _Disentangled(NamedTuple):
    """Embeddings of distances, projected as keys ("c2p"), as queries ("p2c"), or both."""

    buckets: Tensor | None
    projected: Mapping[str, Tensor]
    scale: float

    def of(self, q: Tensor, k: Tensor) -> ops.PositionBias | None:
        if self.buckets is None or not self.projected:
            return None
        return disentangled_bias(self.buckets, q, k, self.projected, self.scale)


class T5Distances:
    """A number for each bucket of distances and head, the same in all layers (MPNet)."""

    def reason(self, stack: Any) -> str | None:
        table = stack.relative_attention_bias
        if type(table) is nn.Embedding and untouched(table):
            return None
        return "its position bias has a hook, or was replaced"

    def shared(self, stack: Any, x: Tensor) -> ops.PositionBias:
        # transformers' MPNet takes these, whatever its configuration says.
        return ops.PositionBias(
            _buckets(ops.t5_buckets, 32, 128, x.device), table=stack.relative_attention_bias.weight
        )

    def bias(self, attention: Any, shared: Any) -> _Table:
        return _Table(shared)


class DisentangledDistances:
    """Scores of contents and distances (arXiv:2006.03654), as in DeBERTa-v2 and v3."""

    def reason(self, stack: Any) -> str | None:
        if stack.conv is not None:
            return "it has a convolution over neighbouring tokens"
        return None

    def shared(self, stack: Any, x: Tensor) -> tuple[Tensor, Tensor] | None:
        if not stack.relative_attention:
            return None
        span = stack.position_buckets if stack.position_buckets > 0 else -1
        buckets = _buckets(ops.deberta_buckets, stack.max_relative_positions, span, x.device)
        return stack.get_rel_embedding().to(x.dtype), buckets

    def bias(self, attention: Any, shared: Any) -> _Disentangled:
        terms = {"c2p": "key", "p2c": "query"}
        terms = {term: terms[term] for term in terms if term in attention.pos_att_type}
        scale = 1 / math.sqrt(attention.attention_head_size * (1 + len(terms)))
        if shared is None:
            return _Disentangled(None, {}, scale)
        embeddings, buckets = shared
        embeddings = attention.pos_dropout(embeddings)
        own = "" if attention.share_att_key else "pos_"
        projected = {
            term: dense(getattr(attention, f"{own}{name}_proj"), embeddings)
            for term, name in terms.items()
        }
        return _Disentangled(buckets, projected, scale)


def _buckets(make: Callable, first: int, second: int, device: torch.device) -> Tensor:
    if torch.compiler.is_compiling():
        return make(first, second, device)
    # Not a tensor: one made under torch.inference_mode could not be used in training.
    return torch.from_numpy(_bucket_array(make, first, second)).to(device)


@functools.lru_cache
def _bucket_array(make: Callable, first: int, second: int) -> np.ndarray:
    return make(first, second).numpy()
