"""Floating-point operations that an encoder needs, for model FLOPs utilisation (MFU).

The count is that of the model, not of this implementation (Chowdhery et al., 2022,
arXiv:2204.02311, appendix B): every layer for every real token, attention within each sequence,
logits for masked tokens only. A multiply-add is 2 operations, and the backward pass costs twice the
forward pass. Embedding look-ups, normalisation, GELU, softmax and recomputation are not counted. A
layer that runs forward only counts its forward pass. The last layer is counted for all tokens,
although training computes only some rows of it (see `QueryRows`): the shortcut then shows as a
higher MFU, and figures stay comparable with other implementations.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    layer: int
    """Operations of one layer."""
    rest: int
    """Operations of everything else: heads, and the layer that widens factorised embeddings."""
    qkv: int
    """Operations of a layer's product that computes queries, keys and values."""
    decoder: int
    """Operations of the heads' product with the word embedding."""


def forward_flops(config: EncoderConfig, lengths: Lengths, num_masked: int | None = None) -> int:
    """Counts the operations of one forward pass, including the heads of the configuration.

    Args:
        config: the model's configuration.
        lengths: lengths of the sequences [B], on the host; or a batch.
        num_masked: number of tokens whose logits are needed; by default the masked tokens of a
            `PackedInputs`, and 15 % of the tokens of anything else.
    """
    parts = _forward_parts(config, lengths, num_masked)
    return len(config.layer_order) * parts.layer + parts.rest


def training_flops(
    config: EncoderConfig,
    lengths: Lengths,
    num_masked: int | None = None,
    *,
    layers: int | None = None,
    frozen_layers: int = 0,
    frozen_decoder: bool = False,
) -> int:
    """Counts the operations of a forward and backward pass: 3 times `forward_flops` by default.

    Args:
        config: the model's configuration.
        lengths: see `forward_flops`.
        num_masked: see `forward_flops`.
        layers: number of layers that run; by default all layers of the model.
        frozen_layers: number of layers, from the bottom, that run forward only. The layer above
            them needs no gradient of its input, which saves a third of the work of its query, key
            and value product.
        frozen_decoder: whether the word embedding gets no gradient. Then the logits' backward pass
            is one product instead of two.
    """
    parts = _forward_parts(config, lengths, num_masked)
    layers = len(config.layer_order) if layers is None else layers
    flops = 3 * (layers * parts.layer + parts.rest) - 2 * frozen_layers * parts.layer
    if frozen_layers:
        flops -= parts.qkv if frozen_layers < layers else 0
    return flops - (parts.decoder if frozen_decoder else 0)


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
    # queries, keys, values, output projection: 4 hidden^2; feed-forward: 2 hidden * intermediate
    dense = 2 * tokens * (4 * hidden**2 + 2 * hidden * config.intermediate_size)
    attention = 2 * int((sizes**2).sum()) * 2 * hidden  # QK^T and PV
    transform = 2 * num_masked * hidden * width
    decoder = 2 * num_masked * width * config.vocab_size
    heads = {
        "mlm": transform + decoder,
        "nsp": 2 * int((sizes > 0).sum()) * (hidden**2 + 2 * hidden),
        "rtd": 2 * tokens * (hidden**2 + hidden),
    }
    projection = 0 if config.embedding_size is None else 2 * tokens * width * hidden
    return _ForwardFlops(
        layer=dense + attention,
        rest=projection + sum(heads[name] for name in config.heads),
        qkv=2 * tokens * 3 * hidden**2,
        decoder=decoder,
    )


def padded_training_flops(
    config: EncoderConfig, batch_size: int, seqlen: int, num_logits: int | None = None
) -> int:
    """Counts the operations of a forward and backward pass of a model that computes padding too.

    Args:
        config: the model's configuration.
        batch_size: number of sequences B.
        seqlen: length S that every sequence is padded to.
        num_logits: number of positions whose logits the model computes; by default all B * S.
    """
    lengths = np.full(batch_size, seqlen, np.int64)
    return training_flops(
        config, lengths, batch_size * seqlen if num_logits is None else num_logits
    )
