"""The balancer: gives examples to ranks and steps, and packs them into rows (csrc/balancer)."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_double, c_int64, c_uint64
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bert_unpad._host_calls import NONE, Handle, call, integer, pointers, take, unsigned, vector

_METHODS = ("best_fit", "shortest_first")


class _Work(ctypes.Structure):
    _fields_ = (("linear", c_double), ("quadratic", c_double))


class _Options(ctypes.Structure):
    _fields_ = (
        *(("num_replicas", c_int64), ("batch_size", c_int64)),
        *(("seed", c_uint64), ("epoch", c_uint64), ("segment", c_uint64)),
        *(("work", _Work), ("pool_steps", c_int64), ("exchange_ranks", c_int64)),
    )


@dataclass(frozen=True)
class WorkModel:
    """Work of a sequence of length s: linear * s + quadratic * s**2.

    The unit is free, only ratios matter. ValueError if negative, not finite or both 0.
    """

    linear: float
    quadratic: float

    def __post_init__(self) -> None:
        self(0)

    @staticmethod
    def for_hidden(hidden: int = 1024) -> WorkModel:
        """FLOPs of one forward Transformer layer of this hidden size.

        24 * hidden**2 a token in the linear layers (intermediate size 4 * hidden), and in attention
        4 * s * hidden.
        """
        work = _Work()
        call("bu_work_for_hidden", c_int64(integer("hidden", hidden)), byref(work))
        return WorkModel(work.linear, work.quadratic)

    def __call__(self, length: float) -> float:
        work = c_double()
        call("bu_work", byref(self._values), c_double(length), byref(work))
        return work.value

    @property
    def _values(self) -> _Work:
        return _Work(self.linear, self.quadratic)


class EpochPlan:
    """Which examples each rank gets in each step of one epoch.

    A pure function of the arguments, the same on every rank.

    Args:
        lengths: uint16 [N], kept by reference: do not change it afterwards.
        population: uint32, ascending, the examples to use; None means all.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it.
    """

    def __init__(
        self,
        lengths: NDArray[np.uint16],
        *,
        strategy: str,
        num_replicas: int,
        batch_size: int,
        seed: int,
        epoch: int,
        segment: int = 0,
        work: WorkModel,
        pool_steps: int,
        exchange_ranks: int = 8,
        population: NDArray[np.uint32] | None = None,
    ) -> None:
        self._lengths = lengths
        self._ranks = integer("num_replicas", num_replicas)
        options = _Options(
            num_replicas=self._ranks,
            batch_size=integer("batch_size", batch_size),
            seed=unsigned("seed", seed),
            epoch=unsigned("epoch", epoch),
            segment=unsigned("segment", segment),
            work=work._values,
            pool_steps=integer("pool_steps", pool_steps),
            exchange_ranks=integer("exchange_ranks", exchange_ranks),
        )
        chosen = NONE if population is None else vector("population", population, np.uint32)
        (plan,) = pointers(1)
        steps, examples = c_int64(), c_int64()
        call(
            *("bu_plan", strategy.encode(), vector("lengths", lengths, np.uint16), chosen),
            *(byref(options), byref(plan), byref(steps), byref(examples)),
        )
        self._plan = Handle(plan)
        self.steps = steps.value
        """Number of steps, the same on all ranks."""
        self.num_examples = examples.value

    def block(self, step: int) -> tuple[int, int]:
        """(first, last): the steps that are computed together with this one.

        Asking for whole blocks is cheapest.
        """
        first, last = c_int64(), c_int64()
        call("bu_plan_block", self._plan, _int64("step", step), byref(first), byref(last))
        return first.value, last.value

    def rank_steps(
        self, rank: int, first: int, last: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(indices, ends) of one rank in steps [first, last).

        indices: int64, the examples, longest first in each step. ends: int64 [last - first], where
        each step ends in indices.
        """
        indices, ends = pointers(2)
        call(
            *("bu_plan_rank_steps", self._plan, _int64("rank", rank), *_range(first, last)),
            *(byref(indices), byref(ends)),
        )
        return take(indices, np.int64), take(ends, np.int64)

    def work(self, first: int, last: int) -> NDArray[np.float64]:
        """Work of every rank in steps [first, last).

        float64 [last - first, num_replicas], in the work model's unit.
        """
        (found,) = pointers(1)
        call("bu_plan_work", self._plan, *_range(first, last), byref(found))
        return take(found, np.float64).reshape(last - first, self._ranks)

    def received(self, first: int, last: int) -> NDArray[np.int64]:
        """What every rank receives from others in steps [first, last).

        int64 [last - first, num_replicas, 2, 2]: from its exchange_ranks neighbours and from
        farther ranks; examples and tokens. All 0 for strategies that exchange nothing.
        """
        (found,) = pointers(1)
        call("bu_plan_received", self._plan, *_range(first, last), byref(found))
        return take(found, np.int64).reshape(last - first, self._ranks, 2, 2)

    def remaining(self, done: int) -> NDArray[np.uint32]:
        """The examples of the plan that no rank has met after the first `done` steps.

        uint32, ascending.
        """
        (found,) = pointers(1)
        call("bu_plan_remaining", self._plan, _int64("done", done), byref(found))
        return take(found, np.uint32)


def pack(
    lengths: NDArray[np.uint16],
    row_tokens: int = 512,
    *,
    max_sequences: int | None = None,
    method: str = "best_fit",
    seed: int = 0,
) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Packs sequences into rows of row_tokens tokens, longest first.

    Args:
        lengths: uint16 [N], 1 to row_tokens.
        max_sequences: most in a row, None for no limit.
        method: "best_fit" puts a sequence into the row with the least space that is enough,
            "shortest_first" into the one with the most. Krell et al., "Efficient Sequence Packing
            without Cross-contamination" (2021).
        seed: which the order of rows and of sequences of one length is drawn from.

    Returns:
        (indices, ends): uint32 [N], row after row; int64 [rows], where each row ends in indices.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it.
    """
    sizes = vector("lengths", lengths, np.uint16)
    if method not in _METHODS:
        raise ValueError(f"method: expected 'best_fit' or 'shortest_first', got {method!r}")
    most = row_tokens if max_sequences is None else max_sequences
    indices, ends = pointers(2)
    call(
        *("bu_pack_rows", sizes, _int64("row_tokens", row_tokens), _int64("max_sequences", most)),
        *(method == "best_fit", c_uint64(unsigned("seed", seed)), byref(indices), byref(ends)),
    )
    return take(indices, np.uint32), take(ends, np.int64)


def deal(
    lengths: NDArray[np.uint16],
    counts: NDArray[np.int64],
    *,
    dealing: str,
    group_ranks: int,
    work: WorkModel,
    speeds: NDArray[np.float64] | None = None,
) -> NDArray[np.int64]:
    """Deals the examples that all ranks have read for one step out among them.

    Args:
        lengths: uint16 [N], all examples, rank after rank.
        counts: int64 [ranks], how many each rank has.
        dealing: "plain" (longest first, round after round), "snake" (every second round backwards),
            "lpt" (each to the rank with the least work so far that has a place left; Graham, 1969),
            which all give ranks of a group equally many examples, but for one; "greedy" (lpt
            without places) does not.
        group_ranks: examples stay within groups of so many neighbouring ranks.
        speeds: float64 [ranks], with "greedy": each example goes to the rank that would be done
            with it first; None where all are alike.

    Returns:
        int64 [N], the rank that gets each example. A pure function, the same on every rank.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it.
    """
    (ranks,) = pointers(1)
    call(
        *("bu_deal", vector("lengths", lengths, np.uint16), vector("counts", counts, np.int64)),
        *(dealing.encode(), _int64("group_ranks", group_ranks), byref(work._values)),
        *(NONE if speeds is None else vector("speeds", speeds, np.float64), byref(ranks)),
    )
    return take(ranks, np.int64)


def _int64(name: str, value: Any) -> c_int64:
    return c_int64(integer(name, value))


def _range(first: Any, last: Any) -> tuple[c_int64, c_int64]:
    return _int64("first", first), _int64("last", last)
