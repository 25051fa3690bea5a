"""What is to be trained: the model, the lengths of its data, the global batch and the updates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from bert_unpad.costs.step import num_parameters
from bert_unpad.nn.config import BertConfig
from bert_unpad.nn.flops import MASKED_FRACTION, training_flops

__all__ = ["PRECISIONS", "Workload", "cap_lengths"]

PRECISIONS = ("bf16", "fp16", "fp32")
STRATEGIES = ("stratified", "random")
OPTIMIZERS = ("adamw", "fused_adam", "lamb", "lans")


def cap_lengths(counts: NDArray[np.int64], longest: int) -> NDArray[np.int64]:
    """The histogram of the same sequences, those longer than `longest` cut off there."""
    if len(counts) <= longest + 1:
        return counts
    capped = counts[: longest + 1].copy()
    capped[longest] += counts[longest + 1 :].sum()
    return capped


@dataclass(frozen=True, eq=False)
class Workload:
    """A training run, whatever it runs on.

    Raises:
        ValueError: a number is out of range, or the lengths do not fit the model.
    """

    config: BertConfig
    """The model."""
    counts: NDArray[np.int64]
    """Sequences of each length, indexed by length: their proportions count."""
    global_batch: int
    """Sequences of an update, over all ranks."""
    updates: int
    precision: str = "bf16"
    """bf16, fp16 or fp32: of the activations."""
    optimizer: str = "adamw"
    strategy: str = "stratified"
    """How sequences are dealt to ranks: stratified or random."""

    def __post_init__(self) -> None:
        for name in ("global_batch", "updates"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 1 or more, got {getattr(self, name)}")
        for name, known in (
            ("precision", PRECISIONS),
            ("optimizer", OPTIMIZERS),
            ("strategy", STRATEGIES),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name}: expected one of {', '.join(known)}, got {getattr(self, name)!r}"
                )
        if not self.counts[1:].any():
            raise ValueError("counts: expected at least one sequence with tokens")
        if self.longest > self.config.max_position_embeddings:
            raise ValueError(
                f"counts: expected lengths of at most {self.config.max_position_embeddings}, the "
                f"model's positions, got {self.longest}"
            )

    @cached_property
    def parameters(self) -> int:
        """Of the model."""
        return num_parameters(self.config)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return int(np.flatnonzero(self.counts)[-1])

    @cached_property
    def mean_length(self) -> float:
        """Tokens of a sequence."""
        return float(self.counts @ np.arange(len(self.counts)) / self.counts.sum())

    @cached_property
    def mean_square(self) -> float:
        """Of the lengths."""
        return float(self.counts @ np.arange(len(self.counts), dtype=float) ** 2) / float(
            self.counts.sum()
        )

    @cached_property
    def heads_share(self) -> float:
        """Share of a pass's arithmetic that is spent above the layers."""
        lengths = [round(self.mean_length)] * 64
        return training_flops(self.config, lengths, layers=0) / training_flops(self.config, lengths)

    def shard_share(self, ranks: int) -> float:
        """Share of the parameters that the rank with the most has, where so many share them out.

        PyTorch's ZeroRedundancyOptimizer gives each rank whole parameters, so the largest, the word
        embedding, is a bound.
        """
        largest = self.config.padded_vocab_size * self.config.hidden_size
        return max(1 / ranks, largest / self.parameters) if ranks > 1 else 1.0

    def most_tokens(self, sequences: int) -> int:
        """Tokens that a pass with so many sequences is given memory for.

        Three standard deviations above the mean of independent draws, and never more than if all
        were of full length. Balanced steps stay below that: their passes are alike.
        """
        deviation = math.sqrt(max(self.mean_square - self.mean_length**2, 0.0))
        likely = sequences * self.mean_length + 3 * math.sqrt(sequences) * deviation
        return math.ceil(min(likely, sequences * self.longest))

    def most_masked(self, tokens: int) -> int:
        """Tokens of so many whose logits are computed."""
        return math.ceil(MASKED_FRACTION * tokens)
