"""The time of a step, and checks of what goes in."""

from dataclasses import replace

import numpy as np
import pytest

from bert_unpad.costs.compute import ComputeCost
from bert_unpad.costs.device import Device
from bert_unpad.costs.network import Cluster, Link
from bert_unpad.costs.overlap import Overlap
from bert_unpad.costs.step import StepModel
from bert_unpad.costs.workload import Workload, cap_lengths
from tests.support.cost_models import TINY, all_of


def test_step_time_waits_for_the_slowest_rank_and_a_late_exchange():
    slow = Link(0, 1.0)  # a byte a second
    model = StepModel(
        ComputeCost(1.0), Cluster(2, slow, slow, "ring"), Overlap(8, overlapped=False)
    )
    busy = np.array([[1.0, 3.0], [2.0, 2.0]])
    received = np.array([[[4.0, 0.0], [0.0, 0.0]], [[30.0, 0.0], [6.0, 0.0]]])
    time = model.step_time(busy, received, sequences=4)
    reduce = 8.0  # 2 * (n-1)/n * bytes
    assert (time.compute, time.straggler, time.allreduce) == (2.0, 0.5, reduce)
    assert time.exchange == pytest.approx((30 - (2 + reduce)) / 2)
    assert time.total == pytest.approx(2.5 + reduce + time.exchange)
    assert time.sequences_per_second == pytest.approx(4 / time.total)


def test_workloads_are_checked():
    counts = all_of(64)
    np.testing.assert_array_equal(cap_lengths(np.array([0, 1, 2, 3, 4]), 2), [0, 1, 9])
    assert cap_lengths(counts, 64) is counts
    for changes, message in (
        ({"global_batch": 0}, "global_batch: expected 1 or more"),
        ({"updates": -1}, "updates: expected 1 or more"),
        ({"precision": "int8"}, "precision: expected one of fp32, bf16, fp16, fp8"),
        ({"optimizer": "sgd"}, "optimizer: expected one of adamw"),
        ({"strategy": "packed"}, "strategy: expected one of stratified, random"),
        ({"counts": np.array([5, 0])}, "counts: expected at least one sequence"),
        ({"counts": all_of(65)}, "counts: expected lengths of at most 64"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(Workload(TINY, counts, 8, 1), **changes)
    with pytest.raises(ValueError, match="memory: expected bytes"):
        Device("none", 0, ComputeCost(1), 0)
    with pytest.raises(ValueError, match="update: expected seconds"):
        Device("none", 1, ComputeCost(1), -1)
