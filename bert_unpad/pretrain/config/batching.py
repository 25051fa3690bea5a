"""Options of how sequences become steps, and which rank gets which sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bert_unpad._tiers import advanced
from bert_unpad.data.sampling.warmup_sampler import BatchWarmup
from bert_unpad.pretrain.config.errors import ConfigError


@dataclass
class BatchingConfig:
    """Sequences per update, and which rank trains on which."""

    strategy: Literal["stratified", "random", "exchange", "packed"] = "stratified"
    """How sequences are dealt to ranks. stratified: equal work for every rank in every step.
    random: plain shuffling. exchange: each rank reads its own part of the data in order, and ranks
    exchange examples for equal work; this needs no index of all lengths. packed: rows of
    data.max_seq_length tokens hold several sequences each, and batch sizes count rows."""
    global_batch_size: int | None = None
    """Sequences per update over all ranks. Give this or batching.batch_size_per_rank."""
    batch_size_per_rank: int | None = None
    """Sequences per forward and backward pass on one rank. Give this or
    batching.global_batch_size."""
    warmup_batch_size: int | None = advanced(None)
    """Sequences of the first update over all ranks. Over batching.warmup_steps updates the batch
    grows in multiples of this to its full size. By default it is full from the beginning."""
    warmup_steps: int | None = advanced(None)
    """With batching.warmup_batch_size: updates until the batch is full."""
    accumulation: int = 1
    """Forward and backward passes per update."""
    scope: Literal["none", "node", "world", "two_level"] = advanced("world")
    """With batching.strategy exchange: how far examples travel. none: not at all. node: to ranks of
    the same machine. world: to any rank. two_level: to any rank in two hops, first within machines,
    then between them."""
    rank_speeds: list[float] | Literal["auto"] | None = advanced(None)
    """How fast each rank is, for ranks of unequal speed: a list of numbers in any unit, or auto to
    measure them during training. Each rank then gets work in proportion to its speed, so fast ranks
    get more sequences than the batch size says. By default all ranks are alike."""
    cost_file: str | None = advanced(None)
    """A file of measured seconds by length, which python -m bert_unpad.simulate --fit writes: ranks
    then get equal shares of these. By default of the model's floating-point operations."""
    shuffle_buffer: int = advanced(8192)
    """With batching.strategy exchange: examples that each rank shuffles at a time."""

    def per_rank(self, world_size: int) -> int:
        """Sequences per update on one rank.

        Raises:
            ConfigError: the global batch cannot be split evenly.
        """
        if self.batch_size_per_rank is not None:
            return self.batch_size_per_rank * self.accumulation
        if self.global_batch_size is None or self.global_batch_size % world_size:
            raise ConfigError(
                "batching.global_batch_size",
                f"expected a multiple of the number of ranks ({world_size}), got "
                f"{self.global_batch_size}",
            )
        return self.global_batch_size // world_size

    def warmup(self, world_size: int) -> BatchWarmup | None:
        """How the batch grows; None where it is full from the beginning.

        Raises:
            ConfigError: the first batch cannot be split evenly, or the full one is no multiple.
        """
        first, full = self.warmup_batch_size, self.per_rank(world_size) * world_size
        if first is None or self.warmup_steps is None:
            return None
        for wanted, rest in (
            (f"a multiple of the number of ranks ({world_size})", first % world_size),
            (f"a divisor of the full batch ({full})", full % first),
        ):
            if rest:
                raise ConfigError("batching.warmup_batch_size", f"expected {wanted}, got {first}")
        return BatchWarmup(full // first, self.warmup_steps)

    def per_pass(self, world_size: int) -> int:
        """Sequences of the largest forward and backward pass on one rank.

        Raises:
            ConfigError: the global batch cannot be split evenly.
        """
        return -(-self.per_rank(world_size) // self.accumulation)
