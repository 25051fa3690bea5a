"""One epoch on all ranks: how much of each step the ranks spend working rather than waiting.

The plans are those that training follows (`bert_unpad.data.sampler` asks the same planner); only
the time of a step is a model, in which a rank is busy in proportion to its work.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bert_unpad._planner import Plan, WorkModel, pack
from bert_unpad.data.sampler import as_lengths, efficiency

__all__ = ["STRATEGIES", "SimulationResult", "simulate"]

_EXCHANGES = [f"/{who}/{how}" for who in ("group", "world") for how in ("plain", "snake", "lpt")]
STRATEGIES = ("stratified", *(s + e for s in ("random", "quotas") for e in ("", *_EXCHANGES)))
"""What the planner can plan.

`stratified` needs every length beforehand and exchanges nothing. `random` and `quotas` draw a
global batch (`quotas`: every rank equally many examples of each quarter of the length range), and
leave it at that, or sort it in a `group` of neighbouring ranks or the whole `world` and deal it
anew: `plain` in turn, `snake` every second round backwards, `lpt` to the rank with the least work
so far."""


@dataclass(frozen=True)
class SimulationResult:
    """What a simulated epoch came to; a step's efficiency is mean / greatest work of a rank."""

    strategy: str
    ranks: int
    batch: int
    """Examples per rank and step."""
    samples: int
    steps: int
    """Per epoch; the last one may not be full."""
    efficiency: float
    """Mean over the steps."""
    efficiency_p5: float
    """5th percentile: 95 % of the steps are better."""
    efficiency_min: float
    """The worst step."""
    fill_padded: float
    """Real tokens as a fraction of what padding every example to the longest one would compute."""
    fill_packed: float
    """The same for packing examples into rows of the longest one's length (best fit)."""
    seconds: float
    """Time to plan the epoch for all ranks, on this machine, in one thread."""
    per_step: NDArray[np.float64] = field(repr=False)
    """float64 [steps]: efficiency of each step."""


def simulate(
    lengths: ArrayLike,
    ranks: int,
    batch: int,
    strategy: str = "stratified",
    *,
    seed: int = 0,
    work: WorkModel | None = None,
    pool_steps: int = 64,
    exchange_ranks: int = 8,
) -> SimulationResult:
    """Plans one epoch for all ranks and adds up their work.

    Args:
        lengths: integers [N], tokens in each example.
        ranks: number of ranks.
        batch: examples per rank and step.
        strategy: one of `STRATEGIES`.
        seed, work, pool_steps: see `bert_unpad.data.sampler.BalancedSampler`.
        exchange_ranks: size of a group that exchanges examples.

    Raises:
        TypeError: `lengths` are not integers.
        ValueError: an argument is out of range, or there is no example.
    """
    lengths = as_lengths(lengths)
    if seed < 0:
        raise ValueError(f"seed: expected 0 or more, got {seed}")
    begin = time.perf_counter()
    plan = Plan(
        lengths,
        strategy=strategy,
        num_replicas=ranks,
        batch_size=batch,
        seed=seed,
        epoch=0,
        work=WorkModel.for_hidden() if work is None else work,
        pool_steps=pool_steps,
        exchange_ranks=exchange_ranks,
    )
    per_step = efficiency(plan.work(0, plan.steps))
    seconds = time.perf_counter() - begin
    longest = int(lengths.max())
    return SimulationResult(
        strategy=strategy,
        ranks=ranks,
        batch=batch,
        samples=len(lengths),
        steps=plan.steps,
        efficiency=float(per_step.mean()),
        efficiency_p5=float(np.percentile(per_step, 5)),
        efficiency_min=float(per_step.min()),
        fill_padded=float(lengths.mean(dtype=np.float64) / longest) if longest else 1.0,
        fill_packed=_fill_packed(lengths, longest),
        seconds=seconds,
        per_step=per_step,
    )


def _fill_packed(lengths: NDArray[np.uint16], longest: int) -> float:
    if longest == 0:
        return 1.0
    _, ends = pack(np.ascontiguousarray(lengths[lengths > 0]), longest)
    return float(lengths.sum(dtype=np.int64) / (longest * len(ends)))
