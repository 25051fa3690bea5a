"""What a pass costs on a GPU of the table: products, attention, streams of bytes, and kernels.

    seconds = products / (share * peak)  +  attention / (share * peak)  +  bytes / bandwidth
              +  a fixed time for each kernel  +  the weights' bytes / bandwidth

The first three grow with the tokens, the last two do not: so an encoder of few tokens a pass is
slow, whatever its arithmetic. Bytes are counted as docs/development/cuda-step.md does, by what each
kernel reads and writes. Constants were fitted, on one half of the published runs and on this
package's own measurements, by benchmarks/check_published.py.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from bert_unpad.costs.cards import Card
from bert_unpad.costs.compute import ComputeCost
from bert_unpad.costs.gradient_buckets import num_parameters
from bert_unpad.nn.config import EncoderConfig
from bert_unpad.nn.flops import (
    MASKED_FRACTION,
    attention_flops,
    flops_by_length,
    training_flops,
)


class KernelRates(NamedTuple):
    """What the kernels of a pass reach of a card; dropout and streams by this package's profile."""

    attention: float = 0.305
    """Share of the peak of 16 bits that attention's products reach, without dropout."""
    dropout: float = 1.4
    """How much longer these take with dropout."""
    streamed: float = 0.62
    """Share of the memory bandwidth that norms, activations and casts reach."""
    kernel: float = 1.6e-6
    """Seconds of a kernel whatever its size."""


RATES = KernelRates()

# Kernels of a layer, forward and backward; of embeddings, heads and losses. Of an H100's profile
# (benchmarks/results/nvidia-h100-80gb-hbm3/model.json) without memsets.
_LAYER_KERNELS, _OTHER_KERNELS = 32, 60
# Bytes that a pass moves for each weight: 16 bits in the forward pass and in the backward pass, and
# the gradient in fp32.
_WEIGHT_BYTES = 8
# With 8 bits, each number that goes into a product is read once more, and written twice in a byte,
# as it is and transposed; about a quarter of the reads are saved by kernels that write both.
_ROUNDING_BYTES = 3


def layer_numbers(config: EncoderConfig) -> int:
    """Numbers that a layer's norms, activation, attention and rotation read or write per token."""
    hidden, wide = config.hidden_size, config.intermediate_size
    attended = config.num_attention_heads * config.head_dim
    # A norm reads two and writes one forward; it reads three and writes two backward.
    norms = 2 * 8 * hidden
    # Forward the activation reads its input (and a gate) and writes; backward it reads the
    # gradient too, and writes that of its input (and of the gate).
    activation = (8 if config.feed_forward == "glu" else 5) * wide
    # Queries, keys, values and the output: forward once, backward twice, with their gradients.
    attention = 12 * attended
    rotation = 8 * attended if config.relative_positions == "rotary" else 0
    return norms + activation + attention + rotation


def rounded_numbers(config: EncoderConfig) -> int:
    """Numbers per token and layer that 8-bit products take: inputs, and outputs' gradients."""
    attended = config.num_attention_heads * config.head_dim
    inputs = 2 * config.hidden_size + attended + config.intermediate_size
    gates = 2 if config.feed_forward == "glu" else 1
    outputs = attended + 2 * config.kv_heads * config.head_dim + 2 * config.hidden_size
    return inputs + outputs + gates * config.intermediate_size


def pass_cost(
    config: EncoderConfig,
    card: Card,
    precision: str,
    longest: int,
    products_share: float | None = None,
    masked: float = MASKED_FRACTION,
) -> ComputeCost:
    """The cost of a forward and backward pass of this package's kernels, from CUDA graphs.

    Args:
        config: the model.
        card: the GPU.
        precision: the trainer's `precision`.
        longest: tokens of the longest sequence; it matters where layers have windows.
        products_share: share of the peak that matrix products reach; None: the card's.
        masked: share of the tokens that are masked.
    """

    def all_flops(lengths: Sequence[int]) -> int:
        return training_flops(config, lengths, round(masked * sum(lengths)))

    rates = RATES
    share = card.products_share(precision) if products_share is None else products_share
    whole, squares = flops_by_length(all_flops, longest)
    near, far = flops_by_length(partial(attention_flops, config), longest)
    attention = rates.attention * card.peak("fp32" if precision == "fp32" else "bf16")
    if config.attention_probs_dropout_prob:
        attention /= rates.dropout
    size = 4 if precision == "fp32" else 2
    layers = len(config.layer_order)
    moved = size * layer_numbers(config)
    if precision == "fp8":
        moved += _ROUNDING_BYTES * rounded_numbers(config)
    bandwidth = rates.streamed * card.bandwidth_gbs * 1e9
    products = share * card.peak(precision)
    kernels = _LAYER_KERNELS * layers + _OTHER_KERNELS
    return ComputeCost(
        linear=(whole - near) / products + near / attention + layers * moved / bandwidth,
        quadratic=max(squares - far, 0.0) / products + far / attention,
        fixed=kernels * rates.kernel + _WEIGHT_BYTES * num_parameters(config) / bandwidth,
    )
