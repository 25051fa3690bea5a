"""The time of an update under one configuration: passes, stragglers, exchange, optimizer.

An update is `accumulation` passes, of which the last exchanges gradients while its backward pass
goes on; all ranks wait for the slowest once, at its end; then each clips and updates. Computing and
communication are taken not to slow each other.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache

from bert_unpad.costs.compute import ComputeCost
from bert_unpad.costs.device import Device
from bert_unpad.costs.gradient_buckets import Bucket, fill_buckets, gradients
from bert_unpad.costs.memory import Memory, memory_of
from bert_unpad.costs.network import Cluster
from bert_unpad.costs.step import StepModel
from bert_unpad.costs.sync import exposed_seconds, weights_seconds
from bert_unpad.costs.workload import Workload
from bert_unpad.data.sampling.histogram import sample_lengths
from bert_unpad.plan.candidates import Candidate
from bert_unpad.simulate.epoch import simulate

__all__ = ["Planner", "UpdateTime"]

# The backward pass has twice the forward pass's products.
_FORWARD = 1 / 3

# What `recompute: gelu` adds to a pass: the GELU of each layer once more, which reads and writes a
# twelfth of what the layer's forward and backward pass move. An estimate.
_GELU_AGAIN = 0.02

# Examples that are planned to know the stragglers: 16 steps, or fewer of a large global batch.
_STEPS, _EXAMPLES = 16, 2**17


@dataclass(frozen=True)
class UpdateTime:
    """Seconds of an update; `total` is the sum of all."""

    compute: float
    """Forward and backward passes, mean over the ranks, without what is computed again."""
    recompute: float
    """What is computed again to save memory."""
    straggler: float
    """By which the slowest rank takes longer than the mean."""
    compress: float
    """Computing of the exchange."""
    network: float
    """Of the exchange, as far as the backward pass does not hide it."""
    update: float
    """Clipping and optimizer."""

    @property
    def total(self) -> float:
        """Of all."""
        return sum(asdict(self).values())

    def to_dict(self) -> dict[str, float]:
        """As JSON keeps it, with the total."""
        return {**asdict(self), "total": self.total}


class Planner:
    """Predicts updates of a workload on a device, for any configuration.

    Args:
        workload: what is trained.
        device: of one rank.
        cluster: nodes and links; its `ranks_per_node` is the GPUs of a node.
        bucket_bytes: limit of DDP's buckets; by default PyTorch's, with its small first bucket.
    """

    def __init__(
        self,
        workload: Workload,
        device: Device,
        cluster: Cluster,
        bucket_bytes: float | None = None,
    ) -> None:
        self.workload = workload
        self.device = device
        self.cluster = cluster
        found = gradients(workload.config, workload.heads_share)
        if bucket_bytes is None:
            self._buckets = fill_buckets(found)
        else:
            self._buckets = fill_buckets(found, bucket_bytes, bucket_bytes)
        self._one_bucket = [Bucket(tuple(found))]
        self._straggler_share = cache(self._simulate)

    def ranks(self, nodes: int) -> int:
        """Of so many nodes."""
        return nodes * self.cluster.ranks_per_node

    def sharers(self, candidate: Candidate) -> int:
        """Ranks that share the optimizer's state out; 1: none does."""
        nodes = {"none": 0, "node": 1, "world": candidate.nodes}[candidate.shard]
        return max(self.ranks(nodes), 1)

    def memory(self, candidate: Candidate) -> Memory:
        """What a rank needs."""
        return memory_of(self.workload, candidate, self.sharers(candidate))

    def fits(self, candidate: Candidate) -> bool:
        """Whether that is in its memory."""
        return self.memory(candidate).total <= self.device.memory

    def update_time(self, candidate: Candidate) -> UpdateTime:
        """Mean time of an update.

        Args:
            candidate: whose batch, accumulation and ranks make up the global batch.
        """
        work, device, ranks = self.workload, self.device, self.ranks(candidate.nodes)
        passes, cost = candidate.accumulation, device.passes
        fixed = passes * cost.fixed + (passes - 1) * device.accumulate
        plain = fixed + candidate.batch * passes * (
            cost.linear * work.mean_length + cost.quadratic * work.mean_square
        )
        again = self._again(candidate.recompute)
        straggler = self._straggler_share(ranks, candidate.batch * passes) * (plain - fixed)
        slowest = (plain * (1 + again) + straggler) / passes
        backward = slowest * (1 - _FORWARD / (1 + again))
        local = candidate.local_sgd_period > 1
        network = exposed_seconds(
            self._one_bucket
            if candidate.compression == "power_sgd" and device.one_bucket
            else self._buckets,
            backward,
            self.cluster,
            self.cluster.ranks_per_node if local else ranks,
            candidate.compression,
        )
        network += weights_seconds(
            work.parameters,
            self.cluster,
            ranks,
            sharers=self.sharers(candidate),
            local_sgd_period=candidate.local_sgd_period,
        )
        return UpdateTime(
            compute=plain,
            recompute=plain * again,
            straggler=straggler,
            compress=device.compress.get(candidate.compression, 0.0) if ranks > 1 else 0.0,
            network=network,
            update=device.clip + device.update * work.shard_share(self.sharers(candidate)),
        )

    def _again(self, recompute: str) -> float:
        """What is computed again, as a share of a pass without it."""
        if recompute == "layer":
            return _FORWARD * (1 - self.workload.heads_share)
        return _GELU_AGAIN if recompute == "gelu" else 0.0

    def _simulate(self, ranks: int, batch: int) -> float:
        """By how much the slowest rank's work exceeds the mean, as a share of the mean."""
        if ranks == 1:
            return 0.0
        cost = self.device.passes
        model = StepModel(
            cost=ComputeCost(cost.linear, cost.quadratic), cluster=Cluster(ranks_per_node=ranks)
        )
        steps = min(_STEPS, max(_EXAMPLES // (ranks * batch), 2))
        lengths = sample_lengths(steps * ranks * batch, 0, self.workload.counts)
        result = simulate(lengths, ranks, batch, self.workload.strategy, model=model)
        return result.step_time.straggler / result.step_time.compute
