"""The cost models, put together for a workload on a device: time and memory of a configuration."""

from dataclasses import replace
from functools import cache

import numpy as np

from bert_unpad._balancer import EpochPlan
from bert_unpad.costs.compute import ComputeCost
from bert_unpad.costs.device import Device
from bert_unpad.costs.gradient_buckets import Bucket, fill_buckets, gradients_of
from bert_unpad.costs.memory import Memory, memory_of
from bert_unpad.costs.network import Cluster
from bert_unpad.costs.optimizers import OPTIMIZER_COSTS
from bert_unpad.costs.overlap import BACKWARD_SHARE, BucketOverlap
from bert_unpad.costs.step import StepModel, StepTime
from bert_unpad.costs.sync import sync_buckets, weights_seconds
from bert_unpad.costs.workload import Part, Workload
from bert_unpad.data.sampling.histogram import sample_lengths
from bert_unpad.nn.flops import training_flops
from bert_unpad.plan.candidates import IN_PASSES, Candidate

# What `recompute: gelu` adds to a pass: the GELU of each layer once more, which reads and writes a
# twelfth of what the layer's forward and backward pass move. An estimate.
_GELU_AGAIN = 0.02
# Steps that are dealt to measure stragglers, or fewer of a large global batch.
_STEPS, _EXAMPLES = 16, 2**17
# `batching.strategy: exchange` by its scope, under the balancer's names.
_DEALING = {"exchange": "random/world/lpt", "exchange_node": "random/node/lpt"}


class Planner:
    """Predicts time and memory of a workload on a device, for any configuration.

    Args:
        workload: what is trained.
        device: the hardware of one rank.
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
        found = gradients_of(workload.config, workload.heads_share)
        if workload.generator is not None:  # its embeddings, the last, are the model's
            own = gradients_of(workload.generator)
            found += [replace(one, ready=1.0) for one in own if one.ready < 1.0]
        if bucket_bytes is None:
            self._buckets = fill_buckets(found)
        else:
            self._buckets = fill_buckets(found, bucket_bytes, bucket_bytes)
        self._one_bucket = [Bucket(tuple(found))]
        self._straggler_share = cache(
            lambda ranks, batch: straggler_share(
                workload, device.passes, ranks, batch, min(ranks, cluster.ranks_per_node)
            )
        )
        self._parts = [
            (part, Planner(part.work, _of_part(device, workload, part), cluster, bucket_bytes))
            for part in workload.parts
        ]

    def ranks(self, nodes: int) -> int:
        """Ranks of so many nodes."""
        return nodes * self.cluster.ranks_per_node

    def sharers(self, candidate: Candidate) -> int:
        """Ranks that share the optimizer's state; 1: none does."""
        nodes = {"none": 0, "node": 1}.get(candidate.shard, candidate.nodes)
        return max(self.ranks(nodes), 1)

    def hierarchical(self, candidate: Candidate) -> bool:
        """Whether gradients need `comm.hook: hierarchical` to be averaged within nodes first."""
        several = self.cluster.ranks_per_node > 1 and candidate.nodes > 1
        plain = candidate.compression != "power_sgd" and candidate.local_sgd_period == 1
        return self.cluster.flat and several and plain

    def memory(self, candidate: Candidate) -> Memory:
        """The memory that a rank needs."""
        return memory_of(
            self.workload,
            candidate.batch,
            compression=candidate.compression,
            recompute=candidate.recompute,
            sharers=self.sharers(candidate),
            shard=candidate.shard,
        )

    def fits(self, candidate: Candidate) -> bool:
        """Whether a rank has that memory."""
        return self.memory(candidate).total <= self.device.memory

    def update_time(self, candidate: Candidate) -> StepTime:
        """Mean time of an update.

        Args:
            candidate: whose batch, accumulation and ranks make up the global batch.
        """
        work, cost, passes = self.workload, self.device.passes, candidate.accumulation
        ranks, batch = self.ranks(candidate.nodes), candidate.batch * candidate.accumulation
        dealt = batch * (cost.linear * work.mean_length + cost.quadratic * work.mean_square)
        compute = passes * cost.fixed + (passes - 1) * self.device.accumulate + dealt
        slowest = compute + self._straggler_share(ranks, batch) * dealt
        syncing = ranks
        if candidate.local_sgd_period > 1:  # local SGD averages the gradients of a node
            apart = OPTIMIZER_COSTS[work.optimizer].averaged > 0
            syncing = 1 if apart else self.cluster.ranks_per_node
        return self._model(candidate, ranks).time_of(
            compute, np.array([slowest]), syncing, work.global_batch
        )

    def run_seconds(self, candidate: Candidate) -> float:
        """Seconds of the whole run, whose parts may make other updates."""
        work = self.workload
        seconds = self.update_time(candidate).total * (
            work.updates - sum(part.updates for part, _ in self._parts)
        )
        for part, planner in self._parts:
            share = part.work.global_batch / work.global_batch
            batch = max(round(candidate.batch * share), 1)
            one = planner.update_time(replace(candidate, batch=batch))
            seconds += part.updates * one.total
        return seconds

    def _model(self, candidate: Candidate, ranks: int) -> StepModel:
        work, device = self.workload, self.device
        again = self._again(candidate.recompute)
        one_bucket = candidate.compression == "power_sgd" and device.one_bucket
        buckets = self._one_bucket if one_bucket else self._buckets
        sharers = self.sharers(candidate)
        in_passes, share = candidate.shard in IN_PASSES, 1 / ranks
        return StepModel(
            cost=device.passes,
            cluster=replace(
                self.cluster, flat=self.cluster.flat and not self.hierarchical(candidate)
            ),
            overlap=BucketOverlap(
                sync_buckets(buckets, candidate.compression),
                (BACKWARD_SHARE + again) / (1 + again),
                0.5 if in_passes else 1.0,
            ),
            passes=candidate.accumulation,
            recompute=again,
            compress=device.compress.get(candidate.compression, 0.0) if ranks > 1 else 0.0,
            weights=weights_seconds(
                (OPTIMIZER_COSTS[work.optimizer].averaged or 1) * work.parameters,
                self.cluster,
                ranks,
                sharers=1 if in_passes else sharers,
                local_sgd_period=candidate.local_sgd_period,
            ),
            update=share * (device.clip + device.update)
            if in_passes
            else device.clip + device.update * work.shard_share(sharers),
            gather=self.cluster.allreduce(4.0 * work.parameters, ranks) / 2 if in_passes else 0.0,
            gathers={"overlap": 1, "fsdp": 2 * candidate.accumulation}.get(candidate.shard, 0),
        )

    def _again(self, recompute: str) -> float:
        """What a pass computes again, as a share of the pass without that."""
        if recompute == "layer":
            return (1 - BACKWARD_SHARE) * (1 - self.workload.heads_share)
        return _GELU_AGAIN if recompute == "gelu" else 0.0


def _of_part(device: Device, workload: Workload, part: Part) -> Device:
    """The device at a part's passes: so much of its arithmetic as that of the run's."""
    ratio = part.share * _flops(part.work) / _flops(workload)
    cost = device.passes
    passes = ComputeCost(ratio * cost.linear, ratio * cost.quadratic, cost.fixed)
    return replace(device, passes=passes)


def _flops(workload: Workload) -> float:
    """Operations of a pass of some tokens, the same for all workloads."""
    return float(sum(training_flops(config, [128] * 64) for config in workload.encoders))


def straggler_share(
    workload: Workload, cost: ComputeCost, ranks: int, batch: int, node_ranks: int = 1
) -> float:
    """What the slowest rank computes beyond the mean, as a share of the mean.

    Args:
        workload: whose lengths and strategy are used.
        cost: of a pass; its fixed part, the same on all ranks, does not count.
        ranks: of the run.
        batch: sequences of a rank and update.
        node_ranks: ranks of a node, among which `exchange_node` exchanges.
    """
    if ranks == 1:
        return 0.0
    steps = min(_STEPS, max(_EXAMPLES // (ranks * batch), 2))
    plan = EpochPlan(
        sample_lengths(steps * ranks * batch, 0, workload.counts),
        strategy=_DEALING.get(workload.strategy, workload.strategy),
        num_replicas=ranks,
        batch_size=batch,
        seed=0,
        epoch=0,
        work=cost.work,
        pool_steps=64,
        exchange_ranks=node_ranks,
    )
    busy = plan.work(0, plan.steps)
    mean = float(busy.mean())
    return (float(busy.max(axis=1).mean()) - mean) / mean
