"""Which examples each rank trains on if several examples share a row of fixed length (packing).

Packing (Krell et al., "Efficient Sequence Packing without Cross-contamination", arXiv:2107.02027)
fills rows of `row_tokens` tokens with several sequences each, so that rectangles hold hardly any
padding. Each step has the same number of rows on every rank, and so almost the same number of
tokens; the number of sequences varies. Here a row is only a budget: the packed batch holds the
sequences of a rank's rows one after another with their own `cu_seqlens`. So attention never crosses
from one sequence to the next, and unused space of a row is not computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bert_unpad._balancer import WorkModel, pack
from bert_unpad.data.sampling.balanced_sampler import efficiency
from bert_unpad.data.sampling.epoch_sampler import EpochSampler, check_at_least


class PackedSampler(EpochSampler):
    """Yields one array of example indices per step: those in this rank's rows.

    Every example occurs once per epoch, on one rank. All ranks have the same number of steps, with
    `batch_size` rows in each but the last, which may have fewer or none. Every epoch makes new rows
    from the seed and deals them in random order. Use it like `BalancedSampler`.

    Args:
        lengths: integers [N], tokens in each example, 1 to `row_tokens`.
        num_replicas: number of ranks.
        rank: this one, 0 to num_replicas - 1.
        batch_size: rows per rank and step.
        seed: all ranks must give the same, 0 to 2**63 - 1.
        row_tokens: tokens of a row.
        max_sequences: most in a row; None for no limit.
        method: "best_fit" or "shortest_first" (the row with the most space left; Krell et al.).
        work: see `BalancedSampler`; only for `straggler_efficiency`.

    Attributes:
        rows: rows of an epoch, the same in all.
        fill: real tokens as a share of what the rows hold.

    Raises:
        TypeError: `lengths` are not integers.
        ValueError: an argument is out of range, or there is no example.
    """

    _rows_done: int
    _steps_done: int

    def __init__(
        self,
        lengths: ArrayLike,
        num_replicas: int,
        rank: int,
        batch_size: int,
        seed: int = 0,
        *,
        row_tokens: int = 512,
        max_sequences: int | None = None,
        method: Literal["best_fit", "shortest_first"] = "best_fit",
        work: WorkModel | None = None,
    ) -> None:
        super().__init__(lengths, num_replicas, rank, batch_size, seed)
        self._num_replicas = num_replicas
        self._global_rows = num_replicas * batch_size
        self._packing: dict[str, Any] = {
            "row_tokens": row_tokens,
            "max_sequences": max_sequences,
            "method": method,
        }
        self._work = WorkModel.for_hidden() if work is None else work
        self._move(epoch=0, rows_done=0, steps_done=0)
        self.rows = len(self._plan()[1]) - 1
        self.fill = int(self.lengths.sum(dtype=np.int64)) / (self.rows * row_tokens)

    @property
    def step(self) -> int:
        """The number of steps of the current epoch yielded so far."""
        return self._steps_done

    @property
    def steps_left(self) -> int:
        """The number of steps left in the current epoch."""
        return -(-(self.rows - self._rows_done) // self._global_rows)

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps of a whole epoch with this number of ranks, the same on all ranks."""
        return -(-self.rows // self._global_rows)

    @property
    def rows_in_step(self) -> int:
        """The number of rows, over all ranks, of the last step that was yielded."""
        first, last = self._last_rows
        return last - first

    def set_epoch(self, epoch: int) -> None:
        """Moves to the beginning of an epoch."""
        check_at_least("epoch", epoch, 0)
        self._move(epoch, rows_done=0, steps_done=0)

    def _batches(self, turn: int) -> Iterator[NDArray[np.int64]]:
        while self._is_current(turn) and self.steps_left > 0:
            first = self._rows_done
            self._last_rows = first, min(first + self._global_rows, self.rows)
            self._rows_done = self._last_rows[1]
            self._steps_done += 1
            yield self._examples(self.rank, *self._last_rows)
        self.set_epoch(self._epoch + 1)

    def straggler_efficiency(self, together: int = 1) -> float:
        """Returns mean over greatest work of a rank in the last step yielded; 1.0 before any.

        Args:
            together: count so many steps, the last ones, as one.
        """
        linear, quadratic = self._work.linear, self._work.quadratic
        first, last = self._last_rows
        first = max(first - (together - 1) * self._global_rows, 0)
        work = np.zeros((1, self._num_replicas))
        for rank in range(self._num_replicas):
            sizes = self.lengths[self._examples(rank, first, last)].astype(np.float64)
            work[0, rank] = (linear * sizes + quadratic * sizes**2).sum()
        return float(efficiency(work)[0])

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, as plain values that JSON keeps exactly."""
        return {
            **self._common_state(),
            "packing": dict(self._packing),
            "rows_done": self._rows_done,
            "steps_done": self._steps_done,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state that was saved on any rank, with any number of ranks.

        The seed is that of the state.

        Raises:
            ValueError: the state is damaged, has another version, is from other data, or, within an
                epoch, from other rows.
        """
        epoch, seed = self._read_common(state)
        try:
            rows_done, steps_done = (int(state[name]) for name in ("rows_done", "steps_done"))
            packing = dict(state["packing"])
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise self._no_state(error) from error
        if packing != self._packing and rows_done > 0:
            raise ValueError(
                f"state: saved within an epoch of rows made by {packing}, expected {self._packing}"
            )
        if steps_done < 0 or not 0 <= rows_done <= self.rows:
            raise ValueError(f"state: a number is out of range in {state}")
        self.seed = seed
        if rows_done == self.rows:
            self.set_epoch(epoch + 1)
        else:
            self._move(epoch, rows_done, steps_done)

    def _move(self, epoch: int, rows_done: int, steps_done: int) -> None:
        self._epoch = epoch
        self._rows_done = rows_done
        self._steps_done = steps_done
        self._last_rows = (rows_done, rows_done)
        self._planned: tuple[NDArray[np.uint32], NDArray[np.int64]] | None = None
        self._turn += 1

    def _plan(self) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Returns the examples row after row, [N], and where each row begins, [rows + 1]."""
        if self._planned is None:
            seed = np.random.SeedSequence([self.seed, self._epoch]).generate_state(1, np.uint64)
            indices, ends = pack(self.lengths, seed=int(seed[0]), **self._packing)
            self._planned = indices, np.concatenate([[0], ends])
        return self._planned

    def _examples(self, rank: int, first: int, last: int) -> NDArray[np.int64]:
        """Returns a rank's examples in the rows of whole steps, longest first."""
        indices, bounds = self._plan()
        rows = range(first + rank, last, self._num_replicas)
        parts = [indices[bounds[row] : bounds[row + 1]] for row in rows]
        chosen = np.concatenate([np.empty(0, np.int64), *parts]).astype(np.int64)
        return chosen[np.argsort(-self.lengths[chosen].astype(np.int64), kind="stable")]
