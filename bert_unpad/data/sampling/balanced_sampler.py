"""Which examples each rank trains on in each step, so that all ranks have equal work.

The balancer itself is C++ (csrc/balancer). Its epoch plan is a pure function of the lengths, the
number of ranks, the seed and the epoch, so ranks agree without communication. This module keeps the
position in the epoch, and saves and restores it. A saved state holds the arguments of a plan, not
the plan. If the number of ranks changes in the middle of an epoch, the earlier plans are computed
again to find the examples that are left, and these are dealt to the new ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bert_unpad._balancer import EpochPlan, WorkModel
from bert_unpad.data.sampling.epoch_sampler import EpochSampler, Population, check_at_least


@dataclass(frozen=True)
class _Segment:
    """The arguments of an epoch plan, except the examples, and how many of its steps are done."""

    num_replicas: int
    batch_size: int
    strategy: str
    pool_steps: int
    linear: float
    quadratic: float
    steps: int = 0

    @property
    def global_batch(self) -> int:
        return self.num_replicas * self.batch_size

    def continues(self, other: _Segment) -> bool:
        """Whether both give the same global batches of the same examples."""
        if self.strategy == other.strategy == "random":
            return self.global_batch == other.global_batch
        return self.at(0) == other.at(0)

    def at(self, steps: int) -> _Segment:
        return _Segment(**{**asdict(self), "steps": steps})


class BalancedSampler(EpochSampler):
    """Yields one array of example indices per step, with equal work on all ranks in every step.

    Every example occurs once per epoch, on one rank. All ranks have the same number of steps, with
    `batch_size` examples in each but the last, which may have fewer or none.

    Iterating starts at the current position, ends with the epoch and moves the sampler:
    `state_dict()` counts every batch that was yielded, and the next iterator yields the next epoch.
    If batches are prepared ahead of training, save the state that was taken together with the batch
    (see `Prefetcher`'s `get_state`), or `state_dict(steps_done)`.

    Strategies:
        stratified: sorts the epoch by length, deals rows of `num_replicas` examples of like length
            to the ranks, and forms steps of equal work from them. Lengths in a global batch are a
            mixture of all lengths, more even than a random draw, as long as `batch_size` lets steps
            have equal work. With batches of about 4 and less the lengths in one step become alike.
        random: a random permutation cut into global batches, dealt round-robin. The global batches
            depend only on num_replicas * batch_size.

    Args:
        lengths: integers [N], tokens in each example, 0 to 65,535. A contiguous uint16 array is
            used without copying and must not be changed afterwards.
        num_replicas: number of ranks.
        rank: this one, 0 to num_replicas - 1.
        batch_size: examples per rank and step.
        seed: all ranks must give the same, 0 to 2**63 - 1.
        strategy: "stratified" or "random".
        work: work of a sequence by its length; by default that of BERT-large's layers
            (`WorkModel.for_hidden(1024)`).
        pool_steps: how many steps are balanced together. More mixes better, and makes
            `straggler_efficiency` slower by the step.
        population: which examples an epoch has, such as a `Mixture`; None for all.

    Raises:
        TypeError: `lengths` are not integers.
        ValueError: an argument is out of range, or there is no example.
    """

    _work_of: tuple[int, NDArray[np.float64]]
    """A step, and the work of the ranks from it on, [steps, ranks]."""

    def __init__(
        self,
        lengths: ArrayLike,
        num_replicas: int,
        rank: int,
        batch_size: int,
        seed: int = 0,
        strategy: Literal["stratified", "random"] = "stratified",
        *,
        work: WorkModel | None = None,
        pool_steps: int = 64,
        population: Population | None = None,
    ) -> None:
        super().__init__(lengths, num_replicas, rank, batch_size, seed, population)
        check_at_least("pool_steps", pool_steps, 1)
        if strategy not in ("stratified", "random"):
            raise ValueError(f"strategy: expected 'stratified' or 'random', got {strategy!r}")
        work = WorkModel.for_hidden() if work is None else work
        self._setup = _Segment(
            num_replicas, batch_size, strategy, pool_steps, work.linear, work.quadratic
        )
        self._move(epoch=0, past=(), done=0)

    @property
    def step(self) -> int:
        """The number of steps of the current epoch yielded so far, on any number of ranks."""
        return self._past_steps + self._done

    @property
    def steps_left(self) -> int:
        """The number of steps left in the current epoch."""
        left = self.epoch_size - sum(part.steps * part.global_batch for part in self._past)
        return -(-left // self._setup.global_batch) - self._done

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps of a whole epoch with this number of ranks, the same on all ranks."""
        return -(-self.epoch_size // self._setup.global_batch)

    def set_epoch(self, epoch: int) -> None:
        """Moves to the beginning of an epoch."""
        check_at_least("epoch", epoch, 0)
        self._move(epoch, past=(), done=0)

    def _batches(self, turn: int) -> Iterator[NDArray[np.int64]]:
        indices, begins, first, last = np.empty(0, np.int64), [0], 0, 0
        while self._is_current(turn) and self.steps_left > 0:
            plan = self._current_plan()
            if not first <= self._done < last:
                first, last = plan.block(self._done)
                indices, ends = plan.rank_steps(self.rank, first, last)
                begins = [0, *ends.tolist()]
            at = self._done - first
            self._done += 1
            yield indices[begins[at] : begins[at + 1]]
        self.set_epoch(self._epoch + 1)

    def straggler_efficiency(self, step: int | None = None, together: int = 1) -> float:
        """Returns the mean over the greatest work of a rank in a step; 1.0 if no rank waits.

        The work of all ranks is computed for a pool of steps at a time (with `random`, for one
        step) and kept until another pool is needed. It takes 0.1 to 0.2 microseconds for each of
        num_replicas * batch_size * pool_steps examples: 0.2 s for 64 steps of 1,024 ranks with 16
        examples each. Call it where training does not wait for it, such as in the thread that
        prepares batches.

        Args:
            step: step of the current epoch, from 0; by default the last one that was yielded.
            together: count so many steps, of which it is the last, as one.

        Raises:
            ValueError: the step does not exist, or was before a change of the number of ranks.
        """
        step = self.step - 1 if step is None else step
        least, end = self._past_steps + together - 1, self.step + self.steps_left
        if not least <= step < end:
            raise ValueError(f"step: expected {least} to {end - 1}, got {step}")
        at = step - self._past_steps
        begin = at - together + 1
        first, work = self._work_of
        if not first <= begin <= at < first + len(work):
            plan = self._current_plan()
            first, last = plan.block(begin)[0], plan.block(at)[1]
            work = plan.work(first, last)
            self._work_of = first, work
        together_work = work[begin - first : at - first + 1].sum(axis=0, keepdims=True)
        return float(efficiency(together_work)[0])

    def work_variation(self) -> float:
        """How much the work of a step varies, see `variation`, in the current plan.

        Of the first pools, with up to 4 million examples; takes up to a second.
        """
        plan = self._current_plan()
        if plan.steps == 0:
            return 0.0
        most = max(plan.block(0)[1], 2**22 // self._setup.global_batch)
        left = self.epoch_size - sum(part.steps * part.global_batch for part in self._past)
        whole = max(left // self._setup.global_batch, 1)  # a last one may be smaller
        return variation(plan.work(0, min(most, whole, plan.steps)))

    def state_dict(self, steps_done: int | None = None) -> dict[str, Any]:
        """Returns the position, as plain values that JSON keeps exactly.

        Args:
            steps_done: number of steps of the current epoch that are done (see `step`); by default
                the number of steps yielded.
        """
        done = self._done if steps_done is None else steps_done - self._past_steps
        if not 0 <= done <= self._done + self.steps_left:
            end = self.step + self.steps_left
            raise ValueError(f"steps_done: expected {self._past_steps} to {end}, got {steps_done}")
        history = [*self._past, self._setup.at(done)] if done else self._past
        return {**self._common_state(), "history": [asdict(part) for part in history]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state that was saved on any rank, with any number of ranks.

        With the same setup as the saved state (ranks, batch size, strategy, work) the same plan
        continues; for `random` an equal global batch size is enough. Otherwise the examples that no
        rank has used in this epoch are dealt again. The seed is that of the state.

        Raises:
            ValueError: the state is damaged, has another version, or is from other data.
        """
        epoch, seed = self._read_common(state)
        try:
            history = tuple(_segment(entry) for entry in state["history"])
        except (KeyError, TypeError, ValueError) as error:
            raise self._no_state(error) from error
        left = self.epoch_size
        for part in history:
            if left <= 0:
                raise ValueError("state: its history goes on after the end of the epoch")
            left -= part.steps * part.global_batch
        if history and left <= -history[-1].global_batch:
            raise ValueError("state: its history has more steps than the epoch")
        self.seed = seed
        if left <= 0:
            self.set_epoch(epoch + 1)
        elif history and history[-1].continues(self._setup):
            self._move(epoch, history[:-1], history[-1].steps)
        else:
            self._move(epoch, history, 0)

    def _move(self, epoch: int, past: tuple[_Segment, ...], done: int) -> None:
        self._epoch = epoch
        self._past = past  # earlier plans of this epoch, each left before its end
        self._past_steps = sum(part.steps for part in past)
        self._done = done  # steps of the current plan
        self._plan: EpochPlan | None = None
        self._work_of = 0, np.empty((0, 1))
        self._turn += 1

    def _current_plan(self) -> EpochPlan:
        if self._plan is None:
            population = None
            if self.population is not None:
                population = self.population.epoch_examples(self.seed, self._epoch)
            for number, part in enumerate(self._past):
                plan = self._make_plan(part, number, population)
                population = plan.remaining(part.steps)
            self._plan = self._make_plan(self._setup, len(self._past), population)
        return self._plan

    def _make_plan(
        self, part: _Segment, number: int, population: NDArray[np.uint32] | None
    ) -> EpochPlan:
        return EpochPlan(
            self.lengths,
            strategy=part.strategy,
            num_replicas=part.num_replicas,
            batch_size=part.batch_size,
            seed=self.seed,
            epoch=self._epoch,
            segment=number,
            work=WorkModel(part.linear, part.quadratic),
            pool_steps=part.pool_steps,
            population=population,
        )


def efficiency(work: NDArray[np.float64]) -> NDArray[np.float64]:
    """Computes the straggler efficiency of steps: the mean over the greatest work of the ranks.

    Args:
        work: float64 [steps, ranks].

    Returns:
        float64 [steps]; 1.0 where no rank has any work.
    """
    greatest = work.max(axis=1)
    return np.divide(work.mean(axis=1), greatest, out=np.ones(len(work)), where=greatest > 0)


def variation(work: NDArray[np.float64]) -> float:
    """How much the work of a step, of all ranks together, varies: its standard deviation over its
    mean.

    Args:
        work: float64 [steps, ranks].
    """
    total = work.sum(axis=1)
    return float(total.std() / total.mean()) if total.any() else 0.0


def _segment(entry: dict[str, Any]) -> _Segment:
    part = _Segment(**{field.name: entry[field.name] for field in fields(_Segment)})
    integers = (part.num_replicas, part.batch_size, part.pool_steps, part.steps)
    if not all(isinstance(value, int) and 1 <= value < 2**31 for value in integers):
        raise ValueError(f"history: expected counts of 1 or more in {entry}")
    WorkModel(part.linear, part.quadratic)
    if part.strategy not in ("stratified", "random"):
        raise ValueError(f"history: unknown strategy {part.strategy!r}")
    return part
