"""Bytes that a rank needs for a configuration.

What a layer keeps per token is counted, not estimated: benchmarks/results/cpu/memory.json, by
`benchmarks/memory.py`, agrees with the formula here to the byte.
"""

from dataclasses import dataclass

from bert_unpad.costs.optimizers import OPTIMIZER_COSTS
from bert_unpad.costs.workload import Workload
from bert_unpad.nn.config import EncoderConfig


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the peak of a step."""

    weights: float
    """Weights in fp32, and with 16-bit activations copies in their type for the backward pass."""
    gradients: float
    """Gradients in fp32; DDP's buckets are their only storage (`gradient_as_bucket_view`)."""
    optimizer: float
    """The optimizer's state, or a rank's part of it."""
    sync: float
    """Buffers that travel, and PowerSGD's error feedback."""
    activations: float
    """What layers keep for the backward pass, and what one layer's backward pass needs besides."""
    logits: float
    """Logits of masked tokens, and the head's activations; the loss's gradient overwrites them."""

    @property
    def state(self) -> float:
        """Bytes that do not depend on the batch."""
        return self.weights + self.gradients + self.optimizer + self.sync

    @property
    def total(self) -> float:
        """Bytes of everything."""
        return self.state + self.activations + self.logits


def layer_bytes_per_token(config: EncoderConfig, precision: str, recompute: str) -> int:
    """What one encoder layer keeps for its backward pass; see docs/architecture.md."""
    size = _bytes(precision)
    if recompute == "layer":
        return config.hidden_size * size
    # Of both halves, the input and, post-norm, what is added to it, or, pre-norm, the sum.
    kept = 4 * config.hidden_size
    # Attention's output; queries, keys and values.
    kept += (2 * config.num_attention_heads + 2 * config.kv_heads) * config.head_dim
    # The output of the activation, and its input.
    products = 2 if config.feed_forward == "glu" else 1
    kept += (products + (recompute != "gelu")) * config.intermediate_size
    # Scores of content and distances, and what they are the products of.
    span = config.relative_buckets or config.max_relative_positions
    scores = config.num_attention_heads * (config.head_dim + 2 * span)
    kept += len(config.relative_terms) * scores
    # Log-sum-exp of each head; mean (not of RMSNorm) and reciprocal deviation of two norms.
    statistics = 8 if config.norm == "rms_norm" else 16
    return kept * size + 4 * config.num_attention_heads + statistics


def memory_of(
    workload: Workload,
    batch: int,
    *,
    compression: str = "none",
    recompute: str = "none",
    sharers: int = 1,
    shard: str = "none",
) -> Memory:
    """The memory of a rank.

    Args:
        workload: what is trained.
        batch: sequences of a pass.
        compression: how gradients travel, of `COMPRESSIONS`.
        recompute: the trainer's `recompute`.
        sharers: ranks that share the optimizer's state; 1: none does.
        shard: the trainer's `optimizer.shard`: with fsdp they share weights and gradients too.
    """
    config, parameters = workload.config, workload.parameters
    size = _bytes(workload.precision)
    tokens = workload.most_tokens(batch)
    masked = workload.most_masked(tokens)
    # bf16: the buffers that travel; PowerSGD: its error feedback and a copy to compute that from.
    sync = {"none": 0, "bf16": 2, "power_sgd": 8, "one_bit": 8}[compression]
    layers = sum(
        len(encoder.layer_order) * layer_bytes_per_token(encoder, workload.precision, recompute)
        for encoder in workload.encoders
    )
    if recompute == "layer":  # the one that is being computed again
        layers += layer_bytes_per_token(config, workload.precision, "none")
    # The embedding's sum and output; the gradients of the activation's output and input, of a
    # layer's input and of its two residuals.
    products = 2 if config.feed_forward == "glu" else 1
    layers += (5 * config.hidden_size + (1 + products) * config.intermediate_size) * size
    # Gathered states, the transform's three outputs; gradients of as many at most.
    head = config.padded_vocab_size + 8 * config.hidden_size
    held = 1 / sharers if shard == "fsdp" else 1.0
    even = shard in ("overlap", "fsdp")
    return Memory(
        weights=parameters * (4 * held + (2 if size == 2 else 0)),
        gradients=4 * parameters * held,
        optimizer=OPTIMIZER_COSTS[workload.optimizer].state
        * parameters
        * (1 / sharers if even else workload.shard_share(sharers)),
        sync=sync * parameters,
        activations=tokens * layers,
        logits=masked * head * size,
    )


def _bytes(precision: str) -> int:
    return 4 if precision == "fp32" else 2
