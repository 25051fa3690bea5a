"""One epoch on all ranks: how much of each step the ranks spend working rather than waiting.

The same balancer that training uses deals the examples to the ranks; only the time of a step is a
model, in which a rank is busy in proportion to its work.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bert_unpad._balancer import EpochPlan, WorkModel, pack
from bert_unpad.costs.step import StepModel, StepTime
from bert_unpad.data.sampling.balanced_sampler import efficiency, variation
from bert_unpad.data.sampling.epoch_sampler import as_lengths
from bert_unpad.data.sampling.speed_sampler import deal_by_speed

# What travels of an example (`bert_unpad.data.store.example_batch`): ids as uint16 and a record;
# before that its length as int64, from its rank to all others of the exchange.
TOKEN_BYTES, EXAMPLE_BYTES, LENGTH_BYTES = 2, 12, 8

_EXCHANGES = [f"/{who}/{how}" for who in ("node", "world") for how in ("plain", "snake", "lpt")]
_BY_SPEED = "/speed"
STRATEGIES = (
    "stratified",
    *(s + e for s in ("random", "quotas") for e in ("", *_EXCHANGES)),
    *(s + _BY_SPEED for s in ("stratified", "random")),
)
"""How the balancer can deal an epoch.

`stratified` needs all lengths beforehand and exchanges nothing. `random` and `quotas` draw a global
batch (`quotas`: every rank the same number of examples of each quarter of the length range). They
leave it at that, or sort it within a `node` of neighbouring ranks or the whole `world` and deal it
again: `plain` in turn, `snake` with every second round backwards, `lpt` to the rank with the least
work so far. `/speed` deals global batches in proportion to the speeds of ranks, as the trainer does
with `batching.rank_speeds`."""
_STEP_KEYS = (*("compute", "straggler", "allreduce", "exchange", "total", "sequences_per_second"),)
"""Parts of a `StepTime` that a simulation has."""


@dataclass(frozen=True)
class Fill:
    """Real tokens as a fraction of what rectangles hold."""

    padded: float
    """Fill with each example padded to the longest one."""
    packed: float
    """Fill with examples packed into rows of the longest one's length, best fit."""

    @classmethod
    def of(cls, lengths: ArrayLike) -> Fill:
        """Fill of a data set of `lengths`, integers [N]; 1.0 where there is no token."""
        lengths = as_lengths(lengths)
        tokens, longest = int(lengths.sum(dtype=np.int64)), int(lengths.max(initial=0))
        if longest == 0:
            return cls(1.0, 1.0)
        _, ends = pack(np.ascontiguousarray(lengths[lengths > 0]), longest)
        return cls(tokens / (longest * len(lengths)), tokens / (longest * len(ends)))


@dataclass(frozen=True)
class SimulationResult:
    """A simulated epoch; a step's efficiency is mean / greatest work of a rank."""

    strategy: str
    ranks: int
    batch: int
    """Examples per rank and step."""
    steps: int
    """Simulated steps; the last one of an epoch may not be full."""
    efficiency: float
    """Mean efficiency of the steps."""
    efficiency_p5: float
    """5th percentile of the efficiency: 95 % of the steps are better."""
    efficiency_min: float
    """Efficiency of the worst step."""
    work_variation: float
    """Standard deviation of the work of a full step, of all ranks, over its mean."""
    exchange_bytes: float
    """Mean bytes that a rank receives in a step: examples, and lengths by which all agree."""
    exchange_bytes_far: float
    """Part of `exchange_bytes` that comes from other nodes."""
    step_time: StepTime
    """Projected time of a step, mean over the steps."""
    deal_seconds: float
    """Seconds to deal the steps to all ranks, on this machine, in one thread."""
    per_step: NDArray[np.float64] = field(repr=False)
    """float64 [steps]: efficiency of each step."""

    def to_dict(self) -> dict[str, object]:
        """What JSON keeps: all that is the same on every machine, without `per_step`."""
        values = asdict(self)
        del values["per_step"], values["deal_seconds"]
        values["step_time"] = {name: values["step_time"][name] for name in _STEP_KEYS}
        return values


def simulate(
    lengths: ArrayLike,
    ranks: int,
    batch: int,
    strategy: str = "stratified",
    *,
    seed: int = 0,
    pool_steps: int = 64,
    model: StepModel | None = None,
    speeds: ArrayLike | None = None,
) -> SimulationResult:
    """Deals one epoch to all ranks and adds up their work.

    Args:
        lengths: integers [N], tokens in each example.
        ranks: number of ranks.
        batch: examples per rank and step.
        strategy: one of `STRATEGIES`.
        seed, pool_steps: see `bert_unpad.data.sampling.balanced_sampler.BalancedSampler`.
        model: what computing and communication cost, and how many ranks a node (`/node/`) has; by
            default `StepModel()`.
        speeds: numbers > 0, as multiples of what the model says: those of the ranks in turn, again
            and again; None: all are alike.

    Raises:
        TypeError: `lengths` are not integers.
        ValueError: an argument is out of range, or there is no example.
    """
    lengths = as_lengths(lengths)
    if seed < 0:
        raise ValueError(f"seed: expected 0 or more, got {seed}")
    model = StepModel() if model is None else model
    if ranks < 1:
        raise ValueError(f"ranks: expected 1 or more, got {ranks}")
    rank_speeds = _speeds(speeds, ranks)
    drawn, by_speed, _ = strategy.partition(_BY_SPEED)
    begin = time.perf_counter()
    plan = EpochPlan(
        lengths,
        strategy=drawn,
        num_replicas=1 if by_speed else ranks,
        batch_size=ranks * batch if by_speed else batch,
        seed=seed,
        epoch=0,
        work=model.cost.work,
        pool_steps=pool_steps,
        exchange_ranks=model.cluster.ranks_per_node,
    )
    if by_speed:
        busy = _work_by_speed(plan, lengths, rank_speeds, model.cost.work)
    else:
        busy = plan.work(0, plan.steps)
    full_steps = max(len(lengths) // (ranks * batch), 1)
    work_variation = variation(busy[:full_steps])
    busy = (busy + model.cost.fixed) / rank_speeds
    deal_seconds = time.perf_counter() - begin
    per_step = efficiency(busy)
    received = _received_bytes(plan, strategy, ranks, batch, model.cluster.ranks_per_node)
    return SimulationResult(
        strategy=strategy,
        ranks=ranks,
        batch=batch,
        steps=plan.steps,
        efficiency=float(per_step.mean()),
        efficiency_p5=float(np.percentile(per_step, 5)),
        efficiency_min=float(per_step.min()),
        work_variation=work_variation,
        exchange_bytes=float(received.sum(axis=2).mean()),
        exchange_bytes_far=float(received[:, :, 1].mean()),
        step_time=model.step_time(busy, received, len(lengths) / plan.steps),
        deal_seconds=deal_seconds,
        per_step=per_step,
    )


def _speeds(speeds: ArrayLike | None, ranks: int) -> NDArray[np.float64]:
    """The speed of each rank, float64 [ranks]."""
    given = np.ones(1) if speeds is None else np.asarray(speeds, np.float64)
    if given.ndim != 1 or not len(given) or not (np.isfinite(given) & (given > 0)).all():
        raise ValueError(f"speeds: expected a list of finite numbers > 0, got {speeds!r}")
    return np.resize(given, ranks)


def _work_by_speed(
    plan: EpochPlan, lengths: NDArray[np.uint16], speeds: NDArray[np.float64], work: WorkModel
) -> NDArray[np.float64]:
    """Work of every rank, float64 [steps, ranks], if a plan for one rank is dealt out by speed."""
    found = np.empty((plan.steps, len(speeds)))
    for step in range(plan.steps):
        indices, _ = plan.rank_steps(0, step, step + 1)
        _, found[step] = deal_by_speed(lengths[indices], speeds, work)
    return found


def _received_bytes(
    plan: EpochPlan, strategy: str, ranks: int, batch: int, ranks_per_node: int
) -> NDArray[np.float64]:
    """What each rank receives in each step from (its node, other nodes): [steps, ranks, 2]."""
    if "/" not in strategy or strategy.endswith(_BY_SPEED):
        return np.zeros((plan.steps, 1, 2))
    counts = plan.received(0, plan.steps)
    received = counts.astype(np.float64) @ np.array([EXAMPLE_BYTES, TOKEN_BYTES], np.float64)
    local = min(ranks_per_node, ranks)
    received[:, :, 0] += LENGTH_BYTES * batch * (local - 1)
    if "/world/" in strategy:
        received[:, :, 1] += LENGTH_BYTES * batch * (ranks - local)
    return received
