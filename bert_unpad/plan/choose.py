"""The best configuration of each number of nodes, what it costs, and what holds it back."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from bert_unpad._choices import COMMUNICATING, LOCAL_SGD_PERIOD
from bert_unpad.costs.memory import Memory
from bert_unpad.costs.step import StepTime
from bert_unpad.costs.sync import HOOK_COMPRESSIONS
from bert_unpad.plan.candidates import Allowed, Candidate, allowed_with, candidates
from bert_unpad.plan.planner import Planner

TIE = 0.01
"""A simpler configuration goes before one that is faster by less than this share: predictions are
not as exact."""

_DAY = 24 * 3600.0


@dataclass(frozen=True)
class Choice:
    """A configuration, and what a whole run with it takes."""

    candidate: Candidate
    ranks: int
    time: StepTime
    memory: Memory
    memory_seconds: float
    """Seconds that an update would save if memory had no limit."""
    updates: int
    """Updates of the run."""
    run_seconds: float
    """Seconds of the whole run."""
    price: float | None
    """Price of one card per hour."""
    band: float = 0.0
    """Share by which the time may be off."""

    @property
    def days_band(self) -> tuple[float, float]:
        """Days of the run, if throughput is off by `band` in either direction."""
        return self.days / (1 + self.band), self.days / (1 - self.band)

    @property
    def days(self) -> float:
        """Days of the whole run, without evaluation, checkpoints and restarts."""
        return self.run_seconds / _DAY

    @property
    def cost(self) -> float | None:
        """Cost of all cards for that long; None without a price."""
        return None if self.price is None else self.days * 24 * self.ranks * self.price

    @property
    def shares(self) -> dict[str, float]:
        """Shares of an update, together 1: computing, network, memory, stragglers.

        Network is what communication adds, with the computing of compression. Memory is what its
        limit costs: passes computed again, or a slower sync that needs less of it.
        """
        total, time = self.time.total, self.time
        # What memory costs is part of recomputing first, then of the network, then of the rest.
        left = self.memory_seconds
        parts = {}
        for name, seconds in (
            ("compute", time.compute + time.recompute + time.update),
            ("network", time.network + time.compress),
            ("stragglers", time.straggler),
        ):
            parts[name] = seconds
        for name, most in (
            ("compute", time.recompute),
            ("network", parts["network"]),
            ("compute", parts["compute"] - time.recompute),
        ):
            taken = min(left, most)
            parts[name] -= taken
            left -= taken
        parts["memory"] = self.memory_seconds - left
        return {
            name: parts[name] / total for name in ("compute", "network", "memory", "stragglers")
        }

    @property
    def bottleneck(self) -> str:
        """The largest of `shares`."""
        shares = self.shares
        return max(shares, key=shares.__getitem__)

    def to_dict(self) -> dict[str, object]:
        """The fields as JSON keeps them."""
        return {
            **self.candidate.to_dict(),
            "ranks": self.ranks,
            "update_seconds": update_seconds(self.time),
            "memory_bytes": _memory_bytes(self.memory),
            "shares": self.shares,
            "bottleneck": self.bottleneck,
            "updates": self.updates,
            "days": self.days,
            "days_band": list(self.days_band),
            "cost": self.cost,
        }


def update_seconds(time: StepTime) -> dict[str, float]:
    """The time of an update as a plan's JSON keeps it."""
    names = ("compute", "recompute", "straggler", "compress", "network", "update", "total")
    return {name: getattr(time, name) for name in names}


def best(
    planner: Planner, nodes: int, allowed: Allowed, price: float | None = None
) -> Choice | None:
    """The fastest configuration that fits, or a simpler one that is as fast within 1 %.

    Args:
        planner: predicts time and memory.
        nodes: how many.
        allowed: what may be used.
        price: of one card per hour.

    Returns:
        None where there is none; `why_none` says why.
    """
    work = planner.workload
    allowed = allowed_with(work, allowed)
    found = [
        (planner.update_time(candidate), candidate)
        for candidate in candidates(
            nodes, planner.cluster.ranks_per_node, work.global_batch, allowed
        )
    ]
    fitting = [(time, candidate) for time, candidate in found if planner.fits(candidate)]
    if not fitting:
        return None
    least = min(time.total for time, _ in fitting)
    time, chosen = min(
        ((time, candidate) for time, candidate in fitting if time.total <= least * (1 + TIE)),
        key=lambda pair: (pair[1].complexity, pair[0].total),
    )
    # Compared with the fastest that fits, not the simplest: the tie has nothing to do with memory.
    without_limit = min(time.total for time, _ in found)
    return Choice(
        candidate=chosen,
        ranks=planner.ranks(nodes),
        time=time,
        memory=planner.memory(chosen),
        memory_seconds=least - without_limit,
        updates=work.updates,
        run_seconds=planner.run_seconds(chosen),
        price=price,
        band=planner.device.band,
    )


def why_none(planner: Planner, nodes: int, allowed: Allowed) -> str:
    """Why no configuration is possible on so many nodes."""
    work, ranks = planner.workload, planner.ranks(nodes)
    if work.global_batch % ranks:
        nearest = max(round(work.global_batch / ranks), 1) * ranks
        return (
            f"a global batch of {work.global_batch:,} does not divide by {ranks:,} ranks; "
            f"{nearest:,} would"
        )
    allowed = allowed_with(work, allowed)
    least = min(
        planner.memory(candidate).total
        for candidate in candidates(
            nodes, planner.cluster.ranks_per_node, work.global_batch, allowed
        )
    )
    return (
        f"the smallest configuration needs {least / 1e9:.1f} GB a rank, of which "
        f"{planner.device.name} gives {planner.device.memory / 1e9:.1f}"
    )


def curve(
    planner: Planner, most_nodes: int, allowed: Allowed, price: float | None = None
) -> list[Choice]:
    """The best of each number of nodes from 1 on, where there is one."""
    found = (best(planner, nodes, allowed, price) for nodes in range(1, most_nodes + 1))
    return [choice for choice in found if choice is not None]


def alternatives(
    planner: Planner, nodes: int, allowed: Allowed, price: float | None = None
) -> list[Choice]:
    """The best with each way to sync gradients, including those that are not allowed."""
    if planner.workload.optimizer in COMMUNICATING:
        return []  # these send in one way
    ways: Sequence[tuple[str, int]] = [(name, 1) for name in HOOK_COMPRESSIONS]
    if nodes > 1:
        ways = [*ways, ("none", LOCAL_SGD_PERIOD)]
    found = []
    for compression, period in ways if planner.ranks(nodes) > 1 else ():
        one = Allowed((compression,), allowed.shards, allowed.recompute, (period,))
        choice = best(planner, nodes, one, price)
        if choice is not None:
            found.append(choice)
    return found


def _memory_bytes(memory: Memory) -> dict[str, float]:
    """A rank's memory as a plan's JSON keeps it, where `sync` is called exchange."""
    parts = {**asdict(memory), "total": memory.total}
    return {"exchange" if name == "sync" else name: size for name, size in parts.items()}
