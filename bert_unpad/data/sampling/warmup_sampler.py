"""Batches that grow to their full size at the beginning of a run (batch-size warm-up).

An epoch is dealt out in parts as large as the first batch. An update takes one of them at first,
then two, and at last as many as the full batch has. So the batches of all sizes use every example
once per epoch, and a position in the epoch is that of the sampler of parts. How many parts an
update takes depends on its number alone, so it is the same on any number of ranks.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bert_unpad.data.sampling.balanced_sampler import BalancedSampler
from bert_unpad.data.sampling.packed_sampler import PackedSampler


@dataclass(frozen=True)
class BatchWarmup:
    """How the batch grows.

    Raises:
        ValueError: a number is less than 1.
    """

    full: int
    """Parts of the full batch; the first batch is one of them."""
    steps: int
    """Updates until the batch is full."""

    def __post_init__(self) -> None:
        for name in ("full", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 1 or more, got {getattr(self, name)}")

    def parts(self, update: int) -> int:
        """Parts that an update takes.

        Args:
            update: updates made before it.
        """
        return min(1 + (self.full - 1) * update // self.steps, self.full)


class WarmupSampler:
    """Yields one array of example indices per update, of one or more parts. Use as `parts`.

    Args:
        parts: deals the epoch out in parts. This object moves it.
        warmup: how many of them an update takes.
        updates: updates that are made already.
    """

    def __init__(
        self, parts: BalancedSampler | PackedSampler, warmup: BatchWarmup, updates: int = 0
    ) -> None:
        self._parts = parts
        self._warmup = warmup
        self._updates = updates
        self._taken = 0  # parts of the last update
        self._rows: int | None = None

    @property
    def lengths(self) -> NDArray[np.uint16]:
        """Tokens of each example, [N]."""
        return self._parts.lengths

    @property
    def epoch(self) -> int:
        """The number of the current pass over the data."""
        return self._parts.epoch

    @property
    def rows_in_step(self) -> int | None:
        """See `EpochSampler.rows_in_step`."""
        return self._rows

    def set_epoch(self, epoch: int) -> None:
        """Moves to the beginning of an epoch."""
        self._parts.set_epoch(epoch)

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        """Yields batches from the current position to the end of the epoch.

        The last one of an epoch has the parts that are left.

        Yields:
            int64 [B], indices of this rank's examples, longest first.

        Raises:
            RuntimeError: the sampler was moved, or another iterator was made, since this one.
        """
        taken: list[NDArray[np.int64]] = []
        rows = 0
        for indices in self._parts:
            taken.append(indices)
            rows += self._parts.rows_in_step or 0
            if len(taken) == self._warmup.parts(self._updates) or not self._parts.steps_left:
                chosen = np.concatenate(taken)
                self._updates += 1
                self._taken = len(taken)
                self._rows = None if self._parts.rows_in_step is None else rows
                taken, rows = [], 0
                yield chosen[np.argsort(-self.lengths[chosen].astype(np.int64), kind="stable")]

    def straggler_efficiency(self) -> float:
        """Returns the mean over the greatest work of a rank in the last update; 1.0 before any."""
        return self._parts.straggler_efficiency(together=self._taken) if self._taken else 1.0

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the epoch, which is that of the parts, as plain values."""
        return self._parts.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state of this or of the sampler of parts, on any number of ranks."""
        self._parts.load_state_dict(state)
