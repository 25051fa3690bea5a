"""A plan as text and as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass

from bert_unpad.plan.choose import TIE, Choice
from bert_unpad.plan.planner import Planner

FORMAT = "bert_unpad plan, version 1"

_NAMES = {
    "compute": "computing",
    "network": "the network",
    "memory": "memory",
    "stragglers": "stragglers",
}


@dataclass(frozen=True)
class Plan:
    """A plan: what was asked for, the best configurations, and what they rest on."""

    planner: Planner
    nodes: int
    """Most nodes that may be used."""
    price: float | None
    """Price of a card per hour."""
    basis: Sequence[str]
    """Sentences that say what was assumed and what was measured."""
    curve: Sequence[Choice]
    """The best configuration of each number of nodes that has one."""
    alternatives: Sequence[Choice]
    """The best choice with each way to sync gradients, on the most nodes of `curve`."""
    left_out: dict[int, str]
    """Numbers of nodes without a configuration, and why."""

    @property
    def best(self) -> Choice:
        """The fastest on any number of nodes; the fewest nodes where more gain less than 1 %."""
        least = min(choice.days for choice in self.curve)
        return next(choice for choice in self.curve if choice.days <= least * (1 + TIE))

    @property
    def cheapest(self) -> Choice | None:
        """The cheapest on any number of nodes; None without a price."""
        return None if self.price is None else min(self.curve, key=lambda choice: choice.cost or 0)

    @property
    def _arguments(self) -> list[str]:
        best, planner = self.best.candidate, self.planner
        return best.trainer_arguments(planner.workload.global_batch, planner.hierarchical(best))

    def to_dict(self) -> dict[str, object]:
        """The fields as JSON keeps them."""
        work, cheapest = self.planner.workload, self.cheapest
        return {
            "format": FORMAT,
            "inputs": {
                "parameters": work.parameters,
                "global_batch": work.global_batch,
                "updates": work.updates,
                "mean_length": work.mean_length,
                "longest": work.longest,
                "precision": work.precision,
                "optimizer": work.optimizer,
                "strategy": work.strategy,
                "nodes": self.nodes,
                "device": self.planner.device.to_dict(),
                "cluster": self.planner.cluster.to_dict(),
                "price": self.price,
            },
            "basis": list(self.basis),
            "best": self.best.to_dict(),
            "arguments": self._arguments,
            "cheapest_nodes": None if cheapest is None else cheapest.candidate.nodes,
            "curve": [choice.to_dict() for choice in self.curve],
            "alternatives": [choice.to_dict() for choice in self.alternatives],
            "left_out": {str(nodes): why for nodes, why in self.left_out.items()},
        }

    def __str__(self) -> str:
        work, best = self.planner.workload, self.best
        lines = [
            f"{work.parameters / 1e6:.0f} M parameters, {work.updates:,} updates of "
            f"{work.global_batch:,} sequences of {work.mean_length:.0f} tokens (at most "
            f"{work.longest}), {work.precision}, on {self.planner.device.name}",
            "",
            *_settings(best),
            "the trainer's options for that: " + " ".join(self._arguments),
            "",
            bottleneck_sentence(best),
            *_fewer_nodes(best, self.curve[-1]),
            "",
            *_table(self.curve),
        ]
        lines += [f"{nodes:>5}  -  {why}" for nodes, why in self.left_out.items()]
        cheapest = self.cheapest
        if cheapest is not None and len(self.curve) > 1:
            lines += [f"cheapest: {_plural(cheapest.candidate.nodes, 'node')}"]
        if self.alternatives:
            lines += [
                "",
                f"{_plural(self.curve[-1].candidate.nodes, 'node')} by each way to sync "
                "gradients (power_sgd and local SGD change what is learned):",
                *_table(self.alternatives),
            ]
        lines += ["", "Evaluation, checkpoints and restarts are not counted. Figures rest on:"]
        lines += [f"- {text}" for text in self.basis]
        return "\n".join(lines)


def bottleneck_sentence(choice: Choice) -> str:
    """What holds an update back, with all shares, in one sentence."""
    shares = choice.shares
    first = choice.bottleneck
    others = sorted((name for name in shares if name != first), key=lambda name: -shares[name])
    rest = ", ".join(f"{_NAMES[name]} {shares[name]:.1%}" for name in others)
    return f"Bottleneck: {_NAMES[first]}, {shares[first]:.1%} of an update ({rest})."


def _settings(choice: Choice) -> list[str]:
    """The best configuration, under the trainer's names."""
    candidate = choice.candidate
    sync = {
        "none": "fp32 gradients",
        "bf16": "bf16 gradients (clip.wire_dtype: bf16)",
        "power_sgd": "PowerSGD (comm.hook: power_sgd)",
        "one_bit": "momenta, one bit a number, after comm.start updates",
    }[candidate.compression]
    if candidate.local_sgd_period > 1:
        sync = (
            "within nodes, weights between nodes every "
            f"{candidate.local_sgd_period} updates (comm.hook: post_local_sgd)"
        )
    low, high = map(_duration, choice.days_band)
    band = f" ({low} to {high})" if choice.band else ""
    cost = "" if choice.cost is None else f", cost {choice.cost:,.2f} (in the currency of --price)"
    return [
        f"{_plural(candidate.nodes, 'node')}, {_plural(choice.ranks, 'rank')}: "
        f"{_duration(choice.days)}{band}{cost}, {choice.time.total * 1e3:,.1f} ms an update",
        f"  sequences of a rank and pass  {candidate.batch}",
        f"  batching.accumulation         {candidate.accumulation}",
        f"  sync of gradients             {sync if choice.ranks > 1 else 'none'}",
        f"  optimizer.shard               {candidate.shard}",
        f"  recompute                     {candidate.recompute}",
        f"  memory of a rank              {choice.memory.total / 1e9:.1f} GB "
        f"({choice.memory.state / 1e9:.1f} of state)",
    ]


def _fewer_nodes(best: Choice, most: Choice) -> list[str]:
    if best is most:
        return []
    return [
        f"All {_plural(most.candidate.nodes, 'node')} would take {_duration(most.days)}: what they "
        f"gain in computing is lost to {_NAMES[most.bottleneck]}."
    ]


def _duration(days: float) -> str:
    for unit, seconds in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if days * 86400 >= seconds:
            return f"{days * 86400 / seconds:.1f} {unit}"
    return f"{days * 86400:.1f} seconds"


def _table(choices: Sequence[Choice]) -> list[str]:
    lines = [
        f"{'nodes':>5}{'batch':>7}{'passes':>8}  {'sync':<12}{'shard':<9}{'recompute':<11}"
        f"{'GB':>6}{'ms':>11}{'days':>10}{'cost':>13}  bottleneck"
    ]
    for choice in choices:
        one = choice.candidate
        sync = one.compression if one.local_sgd_period == 1 else f"local {one.local_sgd_period}"
        cost = "-" if choice.cost is None else f"{choice.cost:,.2f}"
        lines.append(
            f"{one.nodes:>5}{one.batch:>7}{one.accumulation:>8}  {sync:<12}"
            f"{one.shard:<9}{one.recompute:<11}"
            f"{choice.memory.total / 1e9:>6.1f}{choice.time.total * 1e3:>11,.1f}"
            f"{choice.days:>10,.4g}{cost:>13}  {choice.bottleneck}"
        )
    return lines


def _plural(count: int, name: str) -> str:
    return f"{count:,} {name}" if count == 1 else f"{count:,} {name}s"
