"""Which examples each rank trains on if ranks differ in speed: work in proportion to it.

The global batch of a step does not depend on speeds. So its gradient is that of equal ranks, every
example still occurs once per epoch, and speeds may change while an epoch runs.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bert_unpad._balancer import WorkModel, deal
from bert_unpad.data.sampling.balanced_sampler import BalancedSampler, efficiency
from bert_unpad.data.sampling.packed_sampler import PackedSampler
from bert_unpad.data.sampling.warmup_sampler import WarmupSampler


class SpeedSampler:
    """Yields one array of example indices per step, with work in proportion to this rank's speed.

    Every rank deals the global batch of a step out by the same rule: longest example first, each to
    the rank that would be done with it first (Graham's longest processing time first, for machines
    of unequal speed). Use it like `BalancedSampler`.

    Args:
        whole: gives the global batches: a sampler made for one rank, whose batch size is the
            global one. This object moves it.
        rank: this one, 0 to len(speeds) - 1.
        speeds: numbers > 0, one a rank, in any unit.
        work: see `BalancedSampler`.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        whole: BalancedSampler | PackedSampler | WarmupSampler,
        rank: int,
        speeds: ArrayLike,
        *,
        work: WorkModel | None = None,
    ) -> None:
        self._whole = whole
        self._work = WorkModel.for_hidden() if work is None else work
        self._yielded = 0
        self._efficiency = 1.0
        self._speeds = _checked(speeds, None)
        self._later: list[tuple[int, NDArray[np.float64]]] = []
        if not 0 <= rank < len(self._speeds):
            raise ValueError(f"rank: expected 0 to {len(self._speeds) - 1}, got {rank}")
        self.rank = rank

    @property
    def epoch(self) -> int:
        """The number of the current pass over the data."""
        return self._whole.epoch

    @property
    def steps_left(self) -> int:
        """The number of steps left in the current epoch; a `WarmupSampler` has none."""
        return self._whole.steps_left  # type: ignore[union-attr]

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps of a whole epoch; a `WarmupSampler` has none."""
        return self._whole.steps_per_epoch  # type: ignore[union-attr]

    @property
    def rows_in_step(self) -> int | None:
        """See `EpochSampler.rows_in_step`."""
        return self._whole.rows_in_step

    def set_epoch(self, epoch: int) -> None:
        """Moves to the beginning of an epoch."""
        self._whole.set_epoch(epoch)

    def set_speeds(self, speeds: ArrayLike, at: int) -> None:
        """Changes the speeds from a later batch on.

        All ranks must make the same calls. Another thread may be iterating.

        Args:
            speeds: numbers > 0, one a rank.
            at: how many batches this object yields before the first with these speeds, counted
                from its making.

        Raises:
            ValueError: a speed is out of range, or that batch has been dealt out already.
        """
        speeds = _checked(speeds, len(self._speeds))
        if at < self._yielded:
            raise ValueError(f"at: expected {self._yielded} or more, got {at}")
        self._later.append((at, speeds))

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        """Yields batches from the current position to the end of the epoch.

        Yields:
            int64 [B], indices of this rank's examples, longest first; B depends on the speeds.

        Raises:
            RuntimeError: the sampler was moved, or another iterator was made, since this one.
        """
        for indices in self._whole:
            while self._later and self._later[0][0] <= self._yielded:
                self._speeds = self._later.pop(0)[1]
            self._yielded += 1
            yield indices[self._deal(self._whole.lengths[indices]) == self.rank]

    def straggler_efficiency(self) -> float:
        """Returns mean over greatest time of a rank in the last step yielded; 1.0 before any."""
        return self._efficiency

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, as plain values that JSON keeps exactly; speeds are left out."""
        return self._whole.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state of this or of the sampler that gives the global batches."""
        self._whole.load_state_dict(state)

    def _deal(self, lengths: NDArray[np.uint16]) -> NDArray[np.int64]:
        """Returns which rank gets each example, int64 [N]."""
        given, work = deal_by_speed(lengths, self._speeds, self._work)
        self._efficiency = float(efficiency((work / self._speeds)[None])[0])
        return given


def deal_by_speed(
    lengths: NDArray[np.uint16], speeds: NDArray[np.float64], work: WorkModel
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Deals a global batch out to ranks of unequal speed.

    Args:
        lengths: uint16 [N], tokens of each example.
        speeds: float64 [ranks].
        work: of an example, by its length.

    Returns:
        Which rank gets each example, int64 [N], and the work of each rank, float64 [ranks].
    """
    counts = np.zeros(len(speeds), np.int64)
    counts[0] = len(lengths)
    given = deal(
        lengths, counts, dealing="greedy", group_ranks=len(speeds), work=work, speeds=speeds
    )
    sizes = lengths.astype(np.float64)
    each = sizes * (work.linear + work.quadratic * sizes)
    total = np.bincount(given, each, minlength=len(speeds))
    return given, total  # type: ignore[return-value]  # of floats, with weights


def _checked(speeds: ArrayLike, count: int | None) -> NDArray[np.float64]:
    speeds = np.ascontiguousarray(speeds, np.float64)
    if speeds.ndim != 1 or not len(speeds) or (count is not None and len(speeds) != count):
        wanted = "one number a rank" if count is None else f"{count} numbers"
        raise ValueError(f"speeds: expected {wanted}, got shape {list(speeds.shape)}")
    if not (np.isfinite(speeds) & (speeds > 0)).all():
        raise ValueError(f"speeds: expected finite numbers > 0, got {speeds.tolist()}")
    return speeds
