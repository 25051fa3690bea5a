"""The configurations that a plan chooses from: settings that memory or speed depend on."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import get_args

from bert_unpad._choices import ONE_BIT, Shard
from bert_unpad.costs.optimizers import APART_PERIOD, OPTIMIZER_COSTS
from bert_unpad.costs.sync import COMPRESSIONS
from bert_unpad.costs.workload import Workload
from bert_unpad.nn.encoder import Recompute

RECOMPUTE = get_args(Recompute)
SHARDS: tuple[Shard, ...] = get_args(Shard)
"""Values of `optimizer.shard`, the simplest first."""
IN_PASSES = ("overlap", "fsdp")
"""Those that send gradients and weights within passes, without DDP."""


@dataclass(frozen=True)
class Candidate:
    """One configuration on some nodes."""

    nodes: int
    batch: int
    """Sequences of a forward and backward pass on one rank."""
    accumulation: int = 1
    """Passes of an update."""
    compression: str = "none"
    """How gradients travel, of `COMPRESSIONS`."""
    shard: str = "none"
    """The trainer's `optimizer.shard`."""
    recompute: str = "none"
    """The trainer's `recompute`."""
    local_sgd_period: int = 1
    """Updates between averages over all nodes (`comm.hook: post_local_sgd`); 1: in each."""

    @property
    def complexity(self) -> tuple[int, ...]:
        """Orders configurations of similar speed, the simplest first."""
        return (
            int(self.local_sgd_period > 1),
            COMPRESSIONS.index(self.compression),
            RECOMPUTE.index(self.recompute),
            SHARDS.index(self.shard),
            self.accumulation,
        )

    def trainer_arguments(self, global_batch: int, hierarchical: bool = False) -> list[str]:
        """The trainer's options for this configuration, to add to those of a recipe.

        Args:
            global_batch: sequences of an update.
            hierarchical: see `Planner.hierarchical`.
        """
        plain = "hierarchical" if hierarchical else "allreduce"
        hook = "power_sgd" if self.compression == "power_sgd" else plain
        averaging = self.local_sgd_period > 1 and self.local_sgd_period != APART_PERIOD
        arguments = {
            "batching.global_batch_size": global_batch,
            "batching.accumulation": self.accumulation,
            "clip.wire_dtype": "bf16" if self.compression == "bf16" else "fp32",
            "comm.hook": "post_local_sgd" if averaging else hook,
            "optimizer.shard": self.shard,
            "recompute": self.recompute,
        }
        if averaging:
            arguments["comm.local_sgd_period"] = self.local_sgd_period
        return [f"--{key}={value}" for key, value in arguments.items()]

    def to_dict(self) -> dict[str, object]:
        """The fields as JSON keeps them."""
        return asdict(self)


@dataclass(frozen=True)
class Allowed:
    """Settings that candidates may use."""

    compressions: Sequence[str] = ("none", "bf16")
    """Some of `COMPRESSIONS`; by default not PowerSGD, which changes more of what is learned."""
    shards: Sequence[str] = ("none", "node", "world")
    """Values of `optimizer.shard`, by default without `IN_PASSES`, which take no CUDA graphs."""
    recompute: Sequence[str] = RECOMPUTE
    local_sgd_periods: Sequence[int] = (1,)
    """Updates between averages over all nodes; 1: average in each."""


def allowed_with(work: Workload, allowed: Allowed) -> Allowed:
    """What of `allowed` goes with the run's optimizer and growth, as the trainer has it."""
    if work.optimizer in ONE_BIT:
        return replace(allowed, compressions=("one_bit",), shards=("none",), local_sgd_periods=(1,))
    if OPTIMIZER_COSTS[work.optimizer].averaged:
        periods = (APART_PERIOD,)
        return replace(allowed, compressions=("none",), shards=("none",), local_sgd_periods=periods)
    shards: Sequence[str] = allowed.shards
    if work.optimizer == "muon":
        shards = ("none",)
    elif work.parts:
        shards = [shard for shard in shards if shard not in IN_PASSES]
    plain = [name for name in allowed.compressions if name != "one_bit"]
    return replace(allowed, compressions=plain, shards=shards)


def candidates(
    nodes: int, gpus_per_node: int, global_batch: int, allowed: Allowed
) -> Iterator[Candidate]:
    """All configurations for some nodes; none if the global batch does not divide by the ranks.

    The trainer takes a global batch that is a multiple of the ranks; passes of unequal size would
    be no faster than equal ones, so accumulation divides a rank's part.
    """
    ranks = nodes * gpus_per_node
    if global_batch % ranks:
        return
    part = global_batch // ranks
    # One rank syncs and shards nothing; on one node all averages are of the node.
    compressions = allowed.compressions if ranks > 1 else ("none",)
    shards = [shard for shard in allowed.shards if _shares(shard, nodes, gpus_per_node)]
    periods = allowed.local_sgd_periods if ranks > 1 else (1,)
    if nodes == 1 and periods != (APART_PERIOD,):
        periods = (1,)
    for accumulation in (n for n in range(1, part + 1) if part % n == 0):
        for compression in compressions:
            for period in periods:
                if period > 1 and compression != "none":
                    continue  # the trainer has one hook at a time, and it takes fp32
                for shard in shards:
                    if shard in IN_PASSES and compression == "power_sgd":
                        continue  # whose hook is DDP's
                    if period > 1 and shard != "none":
                        continue  # ranks of other nodes have other states in between
                    for recompute in allowed.recompute:
                        yield Candidate(
                            nodes=nodes,
                            batch=part // accumulation,
                            accumulation=accumulation,
                            compression=compression,
                            shard=shard,
                            recompute=recompute,
                            local_sgd_period=period,
                        )


def _shares(shard: str, nodes: int, gpus_per_node: int) -> bool:
    """Whether so many ranks can share what `optimizer.shard` says, and no simpler way is that."""
    ranks = {"node": gpus_per_node, "world": nodes}.get(shard, nodes * gpus_per_node)
    return shard == "none" or ranks > 1
