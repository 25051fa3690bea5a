"""DDP's buckets: how large each is, and how much of the backward pass is done when it is full.

Gradients come in the order of the backward pass: heads, layers from the last to the first,
embeddings. The word embedding is the decoder's weight too, so its gradient, the largest of all, is
complete only at the very end: what its bucket takes nothing can hide. DDP fills buckets with whole
gradients until one reaches the limit; the first one is small, so that the first exchange begins
early (torch/nn/parallel/distributed.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bert_unpad.nn.config import BertConfig

__all__ = ["BUCKET_BYTES", "FIRST_BUCKET_BYTES", "Bucket", "Gradient", "fill_buckets", "gradients"]

BUCKET_BYTES = 25 * 2**20
FIRST_BUCKET_BYTES = 2**20
"""PyTorch's defaults."""


@dataclass(frozen=True)
class Gradient:
    """Of one parameter."""

    shape: tuple[int, ...]
    ready: float
    """Share of the backward pass that is done when it is complete, 0 to 1."""

    @property
    def numel(self) -> int:
        """Numbers in it."""
        return self.shape[0] * (self.shape[1] if len(self.shape) > 1 else 1)


@dataclass(frozen=True)
class Bucket:
    """Gradients that are exchanged together."""

    gradients: tuple[Gradient, ...]

    @property
    def numel(self) -> int:
        """Numbers in it."""
        return sum(gradient.numel for gradient in self.gradients)

    @property
    def ready(self) -> float:
        """Share of the backward pass that is done when it is full."""
        return max(gradient.ready for gradient in self.gradients)


def gradients(config: BertConfig, heads_share: float) -> list[Gradient]:
    """All gradients of `BertForPreTraining`, in the order in which they are complete.

    Args:
        config: the model.
        heads_share: share of the backward pass that is spent in the heads.
    """
    hidden, wide = config.hidden_size, config.intermediate_size
    vocabulary = config.padded_vocab_size
    heads = [(2,), (2, hidden), (hidden,), (hidden, hidden), (vocabulary,)]
    heads += [(hidden,), (hidden,), (hidden,), (hidden, hidden)]
    layer = [(hidden,), (hidden,), (hidden,), (hidden, wide), (wide,), (wide, hidden)]
    layer += [
        (hidden,),
        (hidden,),
        (hidden,),
        (hidden, hidden),
        (3 * hidden,),
        (3 * hidden, hidden),
    ]
    found = list(_spread(heads, 0.0, heads_share))
    share = (1 - heads_share) / config.num_hidden_layers
    for number in range(config.num_hidden_layers):
        found += _spread(layer, heads_share + number * share, share)
    embeddings = [(hidden,), (hidden,), (config.type_vocab_size, hidden)]
    embeddings += [(config.max_position_embeddings, hidden), (vocabulary, hidden)]
    return found + [Gradient(shape, 1.0) for shape in embeddings]


def fill_buckets(
    found: list[Gradient],
    bucket_bytes: float = BUCKET_BYTES,
    first_bytes: float = FIRST_BUCKET_BYTES,
) -> list[Bucket]:
    """Puts fp32 gradients into buckets as DDP does: one is full when it reaches the limit."""
    buckets: list[Bucket] = []
    filling: list[Gradient] = []
    for gradient in found:
        filling.append(gradient)
        limit = first_bytes if not buckets else bucket_bytes
        if 4 * sum(part.numel for part in filling) >= limit:
            buckets.append(Bucket(tuple(filling)))
            filling = []
    if filling:
        buckets.append(Bucket(tuple(filling)))
    return buckets


def _spread(shapes: list[tuple[int, ...]], start: float, share: float) -> Iterator[Gradient]:
    """Complete in turn, each after arithmetic in proportion to its size."""
    total = sum(Gradient(shape, 0).numel for shape in shapes)
    done = 0
    for shape in shapes:
        done += Gradient(shape, 0).numel
        yield Gradient(shape, min(start + share * done / total, 1.0))
