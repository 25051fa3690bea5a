"""By how much the slowest rank's work exceeds the mean, as the trainer's balancer deals it."""

from __future__ import annotations

from bert_unpad._balancer import EpochPlan
from bert_unpad.costs.compute import ComputeCost
from bert_unpad.costs.workload import Workload
from bert_unpad.data.sampling.histogram import sample_lengths

# Steps that are dealt to measure it, or fewer of a large global batch.
_STEPS, _EXAMPLES = 16, 2**17


# `batching.strategy: exchange` by its scope, under the balancer's names.
_DEALING = {"exchange": "random/world/lpt", "exchange_node": "random/node/lpt"}


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
