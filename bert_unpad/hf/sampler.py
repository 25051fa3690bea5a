"""Batches chosen by their cost instead of their count, for the trainers of Hugging Face.

Without padding a batch costs what its tokens cost. So batches of equally many examples take unequal
time, and in data-parallel training every rank waits for the slowest. `CostSampler` gives batches of
equal cost instead, by the planner's rule: the longest example first, each to the batch that costs
least so far (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Sampler

from bert_unpad._balancer import WorkModel
from bert_unpad.data.sampling.epoch_sampler import as_lengths, check_at_least
from bert_unpad.data.sampling.speed_sampler import deal_by_speed

_GRAIN = 16
"""Lengths that differ by less than the mean length over this count as equal. Otherwise a data set
in which few lengths are equal would have the same batches in every epoch."""


class CostSampler(Sampler[list[int]]):
    """Yields lists of example indices: batches of nearly equal cost, none above the budget.

    An epoch has every example once. The number of batches is the same in every epoch, and on every
    rank; it is about the least that the budget allows. Every batch mixes all lengths, and which
    examples meet is drawn for each epoch from (seed, epoch). An example that costs more than the
    budget is a batch of its own. Batches that ranks run at the same time are those nearest in cost.

    What is balanced is the cost of a batch: the sum over its examples of `work`. For that each
    length is rounded up to the longest one of those within a sixteenth of the mean length.

    Use it as `DataLoader(batch_sampler=...)`. With `rank` it yields this rank's batches. Without,
    it yields those of all ranks in turn, which is what `accelerate`, transformers' `Trainer` and
    sentence-transformers deal out themselves.

    Args:
        lengths: integers [N], tokens of each example, 1 to 65,535.
        budget: the most that a batch of two or more examples costs, in the unit of `work`.
        work: cost of an example by its length; None counts tokens.
            `WorkModel.for_hidden(hidden_size)` counts operations, with those of attention, which
            grow with the square of the length.
        num_replicas: number of ranks.
        rank: this one, 0 to num_replicas - 1; None for the batches of all ranks in turn.
        seed: all ranks must give the same, 0 or more.
        drop_last: leave out, in each epoch, batches drawn at random that do not fill a step on all
            ranks. Otherwise there are more and smaller batches until all steps are full.

    Attributes:
        epoch: the number of the pass over the data that iterating yields; see `set_epoch`.

    Raises:
        TypeError: `lengths` are not integers.
        ValueError: an argument is out of range, or the examples do not fill a step on all ranks
            within the budget.
    """

    def __init__(
        self,
        lengths: ArrayLike,
        budget: float,
        *,
        work: WorkModel | None = None,
        num_replicas: int = 1,
        rank: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        lengths = as_lengths(lengths)
        if len(lengths) == 0 or lengths.min() < 1:
            raise ValueError("lengths: expected at least one example, each of 1 token or more")
        if not 0 < budget < math.inf:
            raise ValueError(f"budget: expected a number > 0, got {budget}")
        check_at_least("num_replicas", num_replicas, 1)
        check_at_least("seed", seed, 0)
        if rank is not None and not 0 <= rank < num_replicas:
            raise ValueError(f"rank: expected 0 to {num_replicas - 1}, got {rank}")
        self.num_replicas = num_replicas
        self.rank = rank
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self._sizes = _rounded_up(lengths)
        work = WorkModel(1.0, 0.0) if work is None else work
        budget *= 1 + 1e-9  # costs are sums, which are rounded
        given, costs = _deal(self._sizes, budget, work, 1 if drop_last else num_replicas)
        self._steps = len(costs) // num_replicas
        if self._steps == 0 or not _fits(given, costs, budget):
            raise ValueError(
                f"lengths: expected examples for batches within the budget on {num_replicas} ranks "
                f"in every step, got {len(lengths)} examples; set a larger budget, or drop_last"
            )
        # Batches are numbered by cost. Where, in the order of sizes, the examples of each batch
        # stand, batch after batch, and where each batch ends: the same in every epoch.
        given = np.argsort(np.argsort(costs, kind="stable"))[given]
        self._places = np.argsort(given, kind="stable")
        self._ends = np.cumsum(np.bincount(given))

    @property
    def sampler(self) -> CostSampler:
        """This object: `accelerate` looks here for `set_epoch` where it wraps a batch sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch, 0 or more, whose batches the next iterator yields."""
        check_at_least("epoch", epoch, 0)
        self.epoch = epoch

    def __len__(self) -> int:
        """The number of batches that an iterator yields, in every epoch."""
        return self._steps * (self.num_replicas if self.rank is None else 1)

    def __iter__(self) -> Iterator[list[int]]:
        """Yields the batches of the current epoch from its beginning."""
        random = np.random.default_rng([self.seed, self.epoch])
        by_size = np.lexsort((random.random(len(self._sizes)), self._sizes))
        batches = np.split(by_size[self._places], self._ends[:-1])
        chosen = random.permutation(len(batches))[: self._steps * self.num_replicas]
        steps = np.sort(chosen).reshape(self._steps, self.num_replicas)
        random.shuffle(steps)
        for number in steps.ravel() if self.rank is None else steps[:, self.rank]:
            yield batches[number].tolist()


def _rounded_up(lengths: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """Returns lengths with so many equal ones that examples of equal length can trade places."""
    groups = lengths // max(int(lengths.mean()) // _GRAIN, 1)
    longest = np.zeros(int(groups.max()) + 1, np.uint16)
    np.maximum.at(longest, groups, lengths)
    return longest[groups]


def _deal(
    sizes: NDArray[np.uint16], budget: float, work: WorkModel, unit: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Deals examples to about the fewest batches within the budget, a multiple of `unit`.

    Returns:
        The batch of each example in the order of sizes, int64 [N], and the cost of each batch,
        float64. Batches are above the budget, or empty, where the examples do not suffice.
    """
    sizes = np.sort(sizes)
    tokens = sizes.astype(np.float64)
    costs = tokens * (work.linear + work.quadratic * tokens)

    def deal(steps: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        return deal_by_speed(sizes, np.ones(steps * unit), work)

    least = math.ceil(np.minimum(costs, budget).sum() / budget)
    first = -(-least // unit)
    # Twice the least always suffices: the batch that costs least is then at most half full, and
    # examples of more than half the budget come first and have a batch each.
    last = min(-(-2 * least // unit), len(sizes) // unit)
    more = bisect_left(range(first, last), True, key=lambda steps: _fits(*deal(steps), budget))
    return deal(first + more)


def _fits(given: NDArray[np.int64], costs: NDArray[np.float64], budget: float) -> bool:
    """Whether no batch is empty or above the budget, but for those of a single example."""
    counts = np.bincount(given, minlength=len(costs))
    return bool(((counts == 1) | ((counts > 1) & (costs <= budget))).all())
