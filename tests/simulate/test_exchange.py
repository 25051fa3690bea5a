"""Exchanges of examples in simulated epochs, and what more ranks cost."""

import numpy as np
import pytest

from bert_unpad._balancer import EpochPlan, WorkModel
from bert_unpad.data.sampling.histogram import sample_lengths, wikipedia_lengths
from bert_unpad.simulate import Cluster, StepModel, scaling_curve, simulate
from bert_unpad.simulate.epoch import EXAMPLE_BYTES, LENGTH_BYTES, TOKEN_BYTES


@pytest.mark.parametrize("strategy", ["random/node/lpt", "random/world/snake", "quotas/world/lpt"])
def test_received_is_what_the_plans_of_all_ranks_say(strategy):
    lengths = sample_lengths(500, seed=5)
    ranks, batch, node = 10, 7, 4  # neither whole nodes nor a full last step
    options = {"seed": 3, "epoch": 0, "work": WorkModel(1, 0.01), "pool_steps": 4}
    options |= {"num_replicas": ranks, "batch_size": batch, "exchange_ranks": node}
    plan = EpochPlan(lengths, strategy=strategy, **options)
    drawn = EpochPlan(lengths, strategy=strategy.split("/")[0], **options)  # before the exchange
    expected = np.zeros((plan.steps, ranks, 2, 2), np.int64)
    for step in range(plan.steps):
        drawn_by = {
            int(i): rank for rank in range(ranks) for i in drawn.rank_steps(rank, step, step + 1)[0]
        }
        for rank in range(ranks):
            for i in plan.rank_steps(rank, step, step + 1)[0]:
                if drawn_by[int(i)] != rank:
                    far = int(drawn_by[int(i)] // node != rank // node)
                    expected[step, rank, far] += (1, lengths[i])
    found = plan.received(0, plan.steps)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(plan.received(2, 4), expected[2:4])
    assert found.any()
    assert not drawn.received(0, drawn.steps).any()
    assert found[:, :, 1].any() == ("/world/" in strategy)
    with pytest.raises(ValueError, match="first, last"):
        plan.received(0, plan.steps + 1)


def test_exchange_bytes_are_examples_and_lengths():
    lengths = np.full(64, 10, np.uint16)
    model = StepModel(cluster=Cluster(ranks_per_node=4))
    result = simulate(lengths, 8, 2, "random/world/plain", seed=1, model=model)
    plan = EpochPlan(
        lengths,
        strategy="random/world/plain",
        num_replicas=8,
        batch_size=2,
        seed=1,
        epoch=0,
        work=model.cost.work,
        pool_steps=64,
        exchange_ranks=4,
    )
    moved = plan.received(0, plan.steps)[..., 0].sum() / plan.steps / 8
    expected = moved * (EXAMPLE_BYTES + 10 * TOKEN_BYTES) + 7 * 2 * LENGTH_BYTES
    assert result.exchange_bytes == pytest.approx(expected)
    assert 4 * 2 * LENGTH_BYTES < result.exchange_bytes_far < result.exchange_bytes
    assert simulate(lengths, 8, 2, "random", model=model).exchange_bytes == 0


def test_scaling_curve_falls_and_balance_helps():
    curve = scaling_curve(wikipedia_lengths(), 4, ["stratified", "random"], ranks=(8, 64, 512))
    assert [(point.ranks, point.strategy) for point in curve][:3] == [
        (8, "stratified"),
        (8, "random"),
        (64, "stratified"),
    ]
    for name in ("stratified", "random"):
        shares = [p.step_time.scaling_efficiency for p in curve if p.strategy == name]
        assert 1 > shares[0] > shares[1] > shares[2] > 0
    for balanced, random in zip(curve[::2], curve[1::2], strict=True):
        assert balanced.step_time.total < random.step_time.total
