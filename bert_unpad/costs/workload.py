"""What is to be trained: the model, the lengths of its data, the global batch and the updates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from bert_unpad._choices import Precision
from bert_unpad.costs.gradient_buckets import num_parameters
from bert_unpad.costs.optimizers import OPTIMIZER_COSTS
from bert_unpad.nn.config import EncoderConfig
from bert_unpad.nn.flops import MASKED_FRACTION, training_flops

PRECISIONS: tuple[Precision, ...] = get_args(Precision)
"""Values of `precision`."""
OPTIMIZERS = tuple(OPTIMIZER_COSTS)
"""Optimizers whose cost is modelled, of `optimizer.name`."""
STRATEGIES = ("stratified", "random", "exchange", "exchange_node")
"""Ways to deal sequences to ranks: `batching.strategy`, and exchange with `batching.scope: node`.
What travels of examples is small, and travels beside the step before."""


def cap_lengths(counts: NDArray[np.int64], longest: int) -> NDArray[np.int64]:
    """The histogram of the same sequences, the longer ones cut off at `longest`."""
    if len(counts) <= longest + 1:
        return counts
    capped = counts[: longest + 1].copy()
    capped[longest] += counts[longest + 1 :].sum()
    return capped


class Part(NamedTuple):
    """Updates of a run that differ from its others: a stage of growth, or of a growing batch."""

    updates: int
    work: Workload
    """What these updates train, in place of the run's."""
    share: float = 1.0
    """Share of `work`'s pass that is computed: less where layers are frozen or left out."""


@dataclass(frozen=True, eq=False)
class Workload:
    """A training run, without what it runs on.

    Raises:
        ValueError: a number is out of range, or the lengths do not fit the model.
    """

    config: EncoderConfig
    """The model."""
    counts: NDArray[np.int64]
    """Sequences of each length, indexed by length: their proportions count."""
    global_batch: int
    """Sequences of an update, over all ranks."""
    updates: int
    """Updates of the run."""
    precision: str = "bf16"
    """Type of the activations, of `PRECISIONS`."""
    optimizer: str = "adamw"
    """The optimizer, of `OPTIMIZERS`."""
    strategy: str = "stratified"
    """How sequences are dealt to ranks, of `STRATEGIES`."""
    masked: float = MASKED_FRACTION
    """Share of the tokens that are masked."""
    generator: EncoderConfig | None = None
    """With `data.objective: rtd`, the model that replaces tokens and shares the embeddings."""
    parts: tuple[Part, ...] = ()
    """Parts of the run that make other updates, in any order; the rest of `updates` are whole."""

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
        if self.longest > self.config.max_length:
            raise ValueError(
                f"counts: expected lengths of at most {self.config.max_length}, the "
                f"model's positions, got {self.longest}"
            )

    @cached_property
    def parameters(self) -> int:
        """Parameters of the model."""
        shared = self.config.padded_vocab_size * self.config.embedding_width
        rest = 0 if self.generator is None else num_parameters(self.generator) - shared
        return num_parameters(self.config) + rest

    @property
    def encoders(self) -> tuple[EncoderConfig, ...]:
        """The model, and with `generator` that too."""
        return (self.config,) if self.generator is None else (self.config, self.generator)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return int(np.flatnonzero(self.counts)[-1])

    @cached_property
    def mean_length(self) -> float:
        """Mean tokens of a sequence."""
        return float(self.counts @ np.arange(len(self.counts)) / self.counts.sum())

    @cached_property
    def mean_square(self) -> float:
        """Mean of the squared lengths."""
        return float(self.counts @ np.arange(len(self.counts), dtype=float) ** 2) / float(
            self.counts.sum()
        )

    @cached_property
    def heads_share(self) -> float:
        """Share of a pass's arithmetic that is spent above the layers."""
        lengths = [round(self.mean_length)] * 64
        return training_flops(self.config, lengths, layers=()) / training_flops(
            self.config, lengths
        )

    def shard_share(self, ranks: int) -> float:
        """Largest share of the parameters that one of so many ranks updates.

        PyTorch's ZeroRedundancyOptimizer gives each rank whole parameters, so the largest, the word
        embedding, is a bound.
        """
        largest = self.config.padded_vocab_size * self.config.embedding_width
        return max(1 / ranks, largest / self.parameters) if ranks > 1 else 1.0

    def most_tokens(self, sequences: int) -> int:
        """Tokens that a pass of so many sequences needs memory for.

        Three standard deviations above the mean of independent draws, at most all of full length.
        Balanced passes, which are alike, stay below that.
        """
        deviation = math.sqrt(max(self.mean_square - self.mean_length**2, 0.0))
        likely = sequences * self.mean_length + 3 * math.sqrt(sequences) * deviation
        return math.ceil(min(likely, sequences * self.longest))

    def most_masked(self, tokens: int) -> int:
        """Masked tokens, whose logits are computed, among so many tokens."""
        return math.ceil(self.masked * tokens)
