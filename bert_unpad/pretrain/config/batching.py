"""Settings of how sequences become steps, and who gets which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bert_unpad.pretrain.config.errors import ConfigError


@dataclass
class BatchingConfig:
    """How many sequences make an update, and who gets which."""

    strategy: Literal["stratified", "random", "exchange", "packed"] = "stratified"
    """stratified gives every rank the same work in every step; random is plain shuffling; with
    exchange each rank reads its own part of the data in order and exchanges examples with others
    for equal work, which needs no index of all lengths; packed fills rows of data.max_seq_length
    tokens with several sequences each, and batch sizes then count rows."""
    global_batch_size: int | None = None
    """Sequences per update, over all ranks. Give this or batch_size_per_rank."""
    batch_size_per_rank: int | None = None
    """Sequences per forward and backward pass on one rank."""
    accumulation: int = 1
    """Forward and backward passes per update."""
    prefetch: int = 2
    """Steps that a background thread prepares ahead of training."""
    exchange: Literal["none", "group", "world", "hierarchical"] = "world"
    """exchange: how far examples travel: not at all, within a machine, or to any rank; hierarchical
    is as world, in two hops: within machines, then across."""
    dealing: Literal["plain", "snake", "lpt", "greedy"] = "lpt"
    """exchange: how a step's examples are dealt out, longest first: round after round, with every
    second round backwards, or each to the rank with the least work so far. greedy does the last
    without giving ranks equally many examples, which evens out small batches."""
    shuffle_buffer: int = 8192
    """exchange: examples that each rank shuffles at a time."""
    reader_timeout: float = 120.0
    """exchange: seconds that reading a step's examples may take on any rank."""
    row_packing: Literal["best_fit", "shortest_first"] = "best_fit"
    """packed: which row a sequence goes to, that with the least space that is enough or that with
    the most."""
    max_sequences_per_row: int | None = None
    """packed: most sequences in a row; by default there is no limit."""

    def per_rank(self, world_size: int) -> int:
        """Sequences per update on one rank.

        Raises:
            ConfigError: the global batch cannot be split evenly.
        """
        if self.batch_size_per_rank is not None:
            return self.batch_size_per_rank * self.accumulation
        if self.global_batch_size % world_size:
            raise ConfigError(
                "batching.global_batch_size",
                f"{self.global_batch_size} is not a multiple of the number of ranks ({world_size})",
            )
        return self.global_batch_size // world_size
