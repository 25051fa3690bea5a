"""Floating-point operations that an encoder needs, for model FLOPs utilisation (MFU).

The count is that of the model, not of this implementation (Chowdhery et al., 2022,
arXiv:2204.02311, appendix B): every layer for every real token, attention within each sequence and
window, logits for masked tokens only. A multiply-add is 2 operations, and the backward pass costs
twice the forward pass. Embedding look-ups, normalisation, activations, rotations, softmax and
recomputation are not counted. A layer that runs forward only counts its forward pass. The last
layer is counted for all tokens, although training computes only some rows of it (see `QueryRows`):
the shortcut then shows as a higher MFU, and figures stay comparable with other implementations.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from bert_unpad.batch import PackedInputs, VarlenBatch
from bert_unpad.nn.config import EncoderConfig

MASKED_FRACTION = 0.15
"""The share of tokens that BERT's pretraining masks; the default where no count is given."""

Lengths = PackedInputs | VarlenBatch | Tensor | np.ndarray | Sequence[int]


class _ForwardFlops(NamedTuple):
    """Operations of the parts of one forward pass."""

    layers: list[int]
    """Operations of each layer."""
    rest: int
    """Operations of everything else: heads, and the layer that widens factorised embeddings."""
    qkv: int
    """Operations of a layer's product that computes queries, keys and values."""
    decoder: int
    """Operations of the heads' product with the word embedding."""
    attention: list[int]
    """What of each layer are products of queries with keys, and of weights with values."""


def forward_flops(config: EncoderConfig, lengths: Lengths, num_masked: int | None = None) -> int:
    """Counts the operations of one forward pass, including the heads of the configuration.

    Args:
        config: the model's configuration.
        lengths: lengths of the sequences [B], on the host; or a batch.
        num_masked: number of tokens whose logits are needed; by default the masked tokens of a
            `PackedInputs`, and 15 % of the tokens of anything else.
    """
    parts = _forward_parts(config, lengths, num_masked)
    return sum(parts.layers) + parts.rest


def training_flops(
    config: EncoderConfig,
    lengths: Lengths,
    num_masked: int | None = None,
    *,
    layers: Sequence[int] | None = None,
    frozen_layers: int = 0,
    frozen_decoder: bool = False,
) -> int:
    """Counts the operations of a forward and backward pass: 3 times `forward_flops` by default.

    Args:
        config: the model's configuration.
        lengths: see `forward_flops`.
        num_masked: see `forward_flops`.
        layers: numbers, from 0, of the layers that run; by default all layers of the model.
        frozen_layers: number of layers, from the bottom, that run forward only. The layer above
            them needs no gradient of its input, which saves a third of the work of its query, key
            and value product.
        frozen_decoder: whether the word embedding gets no gradient. Then the logits' backward pass
            is one product instead of two.
    """
    parts = _forward_parts(config, lengths, num_masked)
    run = range(len(parts.layers)) if layers is None else layers
    flops = 3 * (sum(parts.layers[layer] for layer in run) + parts.rest)
    flops -= 2 * sum(parts.layers[layer] for layer in run if layer < frozen_layers)
    if frozen_layers:
        flops -= parts.qkv if any(layer >= frozen_layers for layer in run) else 0
    return flops - (parts.decoder if frozen_decoder else 0)


def attention_flops(config: EncoderConfig, lengths: Lengths) -> int:
    """The part of `training_flops` that attention's products of scores and values take.

    Args:
        config: the model's configuration.
        lengths: see `forward_flops`.
    """
    return 3 * sum(_forward_parts(config, lengths, 0).attention)


def _forward_parts(
    config: EncoderConfig, lengths: Lengths, num_masked: int | None
) -> _ForwardFlops:
    if isinstance(lengths, PackedInputs):
        num_masked = lengths.num_masked if num_masked is None else num_masked
        lengths = lengths.batch
    if isinstance(lengths, VarlenBatch):
        lengths = lengths.lengths
    sizes = np.asarray(lengths, dtype=np.int64)
    tokens = int(sizes.sum())
    if num_masked is None:
        num_masked = round(MASKED_FRACTION * tokens)
    hidden, width = config.hidden_size, config.embedding_width
    attended = config.num_attention_heads * config.head_dim
    qkv = 2 * tokens * hidden * (attended + 2 * config.kv_heads * config.head_dim)
    products = 3 if config.feed_forward == "glu" else 2
    dense = qkv + 2 * tokens * hidden * (attended + products * config.intermediate_size)
    windows = [config.window(layer) for layer in range(len(config.layer_order))]
    # Products of queries and keys with embeddings of distances, and the projections of these.
    span = config.relative_buckets or config.max_relative_positions
    dense += len(config.relative_terms) * 4 * span * attended * (tokens + hidden)
    # QK^T and PV
    attention = {window: 4 * _pairs(sizes, window) * attended for window in set(windows)}
    transform = 2 * num_masked * hidden * width
    decoder = 2 * num_masked * width * config.vocab_size
    heads = {
        "mlm": (transform if config.mlm_transform else 0) + decoder,
        "nsp": 2 * int((sizes > 0).sum()) * (hidden**2 + 2 * hidden),
        "rtd": 2 * tokens * (hidden**2 + hidden),
    }
    projection = 0 if config.embedding_size is None else 2 * tokens * width * hidden
    return _ForwardFlops(
        layers=[dense + attention[window] for window in windows],
        rest=projection + sum(heads[name] for name in config.heads),
        qkv=qkv,
        decoder=decoder,
        attention=[attention[window] for window in windows],
    )


def _pairs(lengths: np.ndarray, window: int) -> int:
    """Pairs of a token and one that it sees, at most `window` tokens away; -1: any."""
    reach = lengths - 1 if window < 0 else np.minimum(lengths - 1, window)
    # Each token sees 2 * reach + 1 tokens, but for what lies beyond both ends.
    return int((lengths * (2 * reach + 1) - reach * (reach + 1))[lengths > 0].sum())


def flops_by_length(
    flops: Callable[[Sequence[int]], int], longest: int = 512
) -> tuple[float, float]:
    """Fits the operations of a sequence: a part for each token and one for each token squared.

    Least squares over lengths up to the longest. With windows it is an approximation: attention
    costs less per token squared in sequences longer than the window. Sums are of integers, so that
    all machines find the same numbers.

    Args:
        flops: operations of a batch by the lengths of its sequences.
        longest: tokens of the longest sequence.

    Returns:
        Operations per token and per token squared.
    """
    # What a batch costs whatever its size is left out. 15 % of 20 tokens are whole numbers.
    sizes = [max(longest, 16) * i // 16 for i in range(1, 17)]
    points = [(size, flops([size] * 40) - flops([size] * 20)) for size in sizes]
    second, third, fourth = (sum(size**power for size, _ in points) for power in (2, 3, 4))
    first_moment, second_moment = (sum(size**power * y for size, y in points) for power in (1, 2))
    quadratic = second * second_moment - third * first_moment
    if quadratic <= 0:
        return first_moment / (20 * second), 0.0
    determinant = 20 * (second * fourth - third**2)
    return (fourth * first_moment - third * second_moment) / determinant, quadratic / determinant
