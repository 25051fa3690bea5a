"""A model's gradients in the order in which they are complete, and the buckets DDP puts them in.

Gradients come in the order of the backward pass: heads, layers from the last to the first,
embeddings. The word embedding is the decoder's weight too, so its gradient, the largest of all, is
complete only at the very end: nothing can hide the sync of its bucket. DDP fills a bucket with
whole gradients until it reaches the limit; the first limit is small, so that the sync begins early
(torch/nn/parallel/distributed.py).
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from bert_unpad.nn import Encoder, EncoderConfig
from bert_unpad.nn.embeddings import Embeddings
from bert_unpad.nn.heads import Pooler, PreTrainingHeads

BUCKET_BYTES = 25 * 2**20
"""PyTorch's limit of a bucket."""
FIRST_BUCKET_BYTES = 2**20
"""PyTorch's limit of the first bucket."""


@dataclass(frozen=True)
class Gradient:
    """The gradient of one parameter."""

    shape: tuple[int, ...]
    ready: float
    """Share of the backward pass that is done when the gradient is complete, 0 to 1."""

    @property
    def numel(self) -> int:
        """Count of its numbers."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Bucket:
    """Gradients that are synced together."""

    gradients: tuple[Gradient, ...]

    @property
    def numel(self) -> int:
        """Count of its numbers."""
        return sum(gradient.numel for gradient in self.gradients)

    @property
    def ready(self) -> float:
        """Share of the backward pass that is done when the bucket is full, 0 to 1."""
        return max(gradient.ready for gradient in self.gradients)


def gradients_of(config: EncoderConfig, heads_share: float = 0.0) -> list[Gradient]:
    """All gradients of `EncoderForPreTraining`, in the order in which they are complete.

    Args:
        config: the model.
        heads_share: share of the backward pass that is spent in the heads.
    """
    smallest = dataclasses.replace(config, num_hidden_layers=config.num_hidden_groups or 1)
    with torch.device("meta"):
        heads, encoder, embeddings = _heads(config), Encoder(smallest), Embeddings(config)
    found = list(_spread([tuple(p.shape) for p in heads], 0.0, heads_share))
    order = config.layer_order
    share = (1 - heads_share) / len(order)
    shapes = [tuple(p.shape) for p in _backward(encoder.layer[0])]
    for passed, depth in enumerate(reversed(range(len(order)))):
        if order[depth] not in order[:depth]:  # of weights used more than once, the last gradient
            found += _spread(shapes, heads_share + passed * share, share)
    own = [p for name, p in encoder.named_parameters() if not name.startswith("layer.")]
    return found + [Gradient(tuple(p.shape), 1.0) for p in (*own, *_backward(embeddings))]


def _heads(config: EncoderConfig) -> list[nn.Parameter]:
    heads = PreTrainingHeads(config)
    found: list[nn.Parameter] = []
    if "rtd" in config.heads:
        found += _backward(heads.detector)
    if "nsp" in config.heads:
        found += _backward(heads.seq_relationship) + _backward(Pooler(config))
    if "mlm" in config.heads:
        # The decoder's before those below it, although the bias is the first parameter.
        (name, first), *others = heads.predictions.named_parameters()
        below = [p for _, p in reversed(others)]
        found += [first, *below] if name == "bias" else [*below, first]
    return found


def _backward(module: nn.Module) -> list[nn.Parameter]:
    """The parameters in the order of a backward pass."""
    return [*module.parameters()][::-1]


def num_parameters(config: EncoderConfig) -> int:
    """Parameters of `EncoderForPreTraining`, the tied embedding counted once."""
    return sum(gradient.numel for gradient in gradients_of(config))


def fill_buckets(
    gradients: list[Gradient],
    bucket_bytes: float = BUCKET_BYTES,
    first_bytes: float = FIRST_BUCKET_BYTES,
) -> list[Bucket]:
    """Puts fp32 gradients into buckets as DDP does: one is full when it reaches the limit."""
    buckets: list[Bucket] = []
    filling: list[Gradient] = []
    for gradient in gradients:
        filling.append(gradient)
        limit = first_bytes if not buckets else bucket_bytes
        if 4 * sum(part.numel for part in filling) >= limit:
            buckets.append(Bucket(tuple(filling)))
            filling = []
    if filling:
        buckets.append(Bucket(tuple(filling)))
    return buckets


def _spread(shapes: list[tuple[int, ...]], start: float, share: float) -> Iterator[Gradient]:
    """Gradients that are complete one after another, each after work in proportion to its size."""
    total = sum(math.prod(shape) for shape in shapes)
    done = 0
    for shape in shapes:
        done += math.prod(shape)
        yield Gradient(shape, min(start + share * done / total, 1.0))
