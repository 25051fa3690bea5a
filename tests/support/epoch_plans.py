"""Makes epoch plans and takes them apart, for tests of the balancer."""

import numpy as np

from bert_unpad import _balancer
from bert_unpad.data.sampling.balanced_sampler import WorkModel

BERT_LARGE = WorkModel.for_hidden(1024)


def make_epoch_plan(lengths, num_replicas, batch_size, strategy="stratified", **options):
    options = {"seed": 5, "epoch": 0, "work": BERT_LARGE, "pool_steps": 8} | options
    return _balancer.EpochPlan(
        np.asarray(lengths, np.uint16),
        strategy=strategy,
        num_replicas=num_replicas,
        batch_size=batch_size,
        **options,
    )


def batches(plan, num_replicas, first=0, last=None):
    """[rank][step] -> indices."""
    last = plan.steps if last is None else last
    result = []
    for rank in range(num_replicas):
        indices, ends = plan.rank_steps(rank, first, last)
        assert indices.dtype == ends.dtype == np.int64
        assert len(ends) == last - first
        assert (ends[-1] if len(ends) else 0) == len(indices)
        result.append(np.split(indices, ends[:-1]) if len(ends) else [])
    return result


def global_batches(plan, num_replicas):
    return [np.concatenate(parts) for parts in zip(*batches(plan, num_replicas), strict=True)]
