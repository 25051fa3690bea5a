"""Plans: the time of an update, what fits, and which configuration is chosen."""

from dataclasses import replace
from itertools import pairwise

import pytest

from bert_unpad.data.sampling.histogram import wikipedia_lengths
from bert_unpad.nn import BertConfig
from bert_unpad.nn.config import PRESETS
from bert_unpad.plan import (
    CARDS,
    Allowed,
    Candidate,
    Device,
    Planner,
    Workload,
    alternatives,
    best,
    card_device,
    curve,
    intra_node_link,
    mixed_device,
    network_link,
)
from bert_unpad.plan.candidates import candidates
from bert_unpad.plan.choose import why_none
from bert_unpad.simulate import Cluster, ComputeCost, Link
from tests.support.cost_models import TINY, all_of

LARGE = BertConfig(**PRESETS["bert-large"])
ALL = Allowed(("none", "bf16", "power_sgd"), local_sgd_periods=(1, 8))


def large_on(card: str, nodes_link: Link, batch: int = 512, **changes) -> Planner:
    work = Workload(LARGE, wikipedia_lengths(), batch, 1000)
    device = replace(card_device(CARDS[card], work), **changes)
    return Planner(work, device, Cluster(4, intra_node_link("pcie"), nodes_link))


def test_an_update_by_hand():
    work = Workload(TINY, all_of(50), 16, 1, precision="fp32")
    cost = ComputeCost(1e-3, 0, 0.01)
    device = Device("by hand", 1e9, cost, 0.06, 0.02, 0.005, {"bf16": 0.02})
    planner = Planner(work, device, Cluster(1, network=Link(1e-3, 1e6)), bucket_bytes=1e9)
    # 2 ranks, 8 sequences of 50 tokens each in 2 passes of 10 ms and 1 ms a token; the one bucket
    # is full when the backward pass ends.
    parameters = work.parameters
    time = planner.update_time(Candidate(2, 4, accumulation=2, compression="bf16"))
    assert time.compute == pytest.approx(8 * 50 * 1e-3 + 2 * 0.01 + 0.005)
    assert time.straggler == pytest.approx(0)
    assert time.network == pytest.approx(2 * (1e-3 + parameters * 2 / 2 / 1e6))
    assert (time.compress, time.update, time.recompute) == (0.02, 0.08, 0)
    assert time.total == pytest.approx(0.425 + time.network + 0.1)
    # Sharded: half of the update, then all weights travel: half an allreduce of 4 bytes each.
    sharded = planner.update_time(Candidate(2, 8, shard="world"))
    plain = planner.update_time(Candidate(2, 8))
    assert sharded.update == pytest.approx(0.02 + 0.06 / 2)
    assert sharded.network - plain.network == pytest.approx(1e-3 + parameters * 4 / 2 / 1e6)
    # Local SGD: no gradient leaves a rank, and weights every 4 updates.
    local = planner.update_time(Candidate(2, 8, local_sgd_period=4))
    assert local.network == pytest.approx(plain.network / 4)
    # One rank sends nothing.
    assert planner.update_time(Candidate(1, 16)).network == 0


def test_mixed_cards_share_work_by_their_speed():
    work = Workload(TINY, all_of(50), 12, 1, precision="fp32")
    fast = Device("fast", 1e9, ComputeCost(1e-3, 0, 0.01), 0.06, 0.02, 0.005, {"bf16": 0.02})
    slow = Device("slow", 9e8, ComputeCost(2e-3, 0, 0.02), 0.12, 0.01, 0.001, {"bf16": 0.01})
    device = mixed_device([fast, slow])
    time = Planner(work, device, Cluster(1)).update_time(Candidate(2, 6))
    # 12 sequences of 50 tokens: 8 take the fast rank 0.4 s, 4 the slow one as long.
    assert time.compute == pytest.approx(0.4 + 0.02)
    assert time.update == pytest.approx(0.12 + 0.02)
    assert device.name == "fast + slow"
    assert device.memory == pytest.approx(min(1e9 / (4 / 3), 9e8))
    assert mixed_device([fast]) is fast


def test_predictions_are_monotonic():
    planners = [large_on("a100-80", Link(1e-5, rate)) for rate in (1e7, 1e8, 1e9, 1e10)]
    for candidate in candidates(2, 4, 64, ALL):
        totals = [planner.update_time(candidate).total for planner in planners]
        assert totals == sorted(totals, reverse=True)
    totals = [best(planner, 2, ALL).time.total for planner in planners]
    # 1 % is what a simpler configuration may take longer.
    assert all(faster <= slower * 1.0100001 for slower, faster in pairwise(totals))
    # Bound by computing, more nodes are never slower.
    found = curve(large_on("l4", network_link("IB-NDR", 4, adapters=4)), 8, Allowed())
    assert [choice.candidate.nodes for choice in found] == [1, 2, 4, 8]
    days = [choice.days for choice in found]
    assert days == sorted(days, reverse=True)
    assert {choice.bottleneck for choice in found} == {"compute"}
    # More passes of the same update cost their kernels, and adding up gradients.
    one, four = (planners[0].update_time(Candidate(1, 128 // n, n)) for n in (1, 4))
    device = planners[0].device
    more = device.accumulate + device.passes.fixed
    assert four.compute - one.compute == pytest.approx(3 * more)


def test_a_plan_never_exceeds_the_memory():
    for memory in (3e9, 5e9, 7e9, 12e9, 40e9):
        planner = large_on("a100-80", network_link("10G", 4), memory=memory)
        choice = best(planner, 2, Allowed())
        if choice is None:
            assert memory < 5e9
            assert "the smallest configuration needs" in why_none(planner, 2, Allowed())
            continue
        assert choice.memory.total <= memory
        assert sum(choice.shares.values()) == pytest.approx(1)
    # Little memory costs passes computed again, or sending weights: it is named.
    tight = best(large_on("a100-80", network_link("IB", 4), memory=6.5e9), 2, Allowed())
    free = best(large_on("a100-80", network_link("IB", 4), memory=1e12), 2, Allowed())
    assert tight.shares["memory"] > 0.01 > free.shares["memory"] == 0
    assert tight.memory_seconds == pytest.approx(tight.time.total - free.time.total, rel=0.2)
    assert tight.candidate.complexity > free.candidate.complexity


def test_the_bottleneck_is_named():
    slow = best(large_on("h100", network_link("100M", 4)), 4, Allowed())
    assert slow.bottleneck == "network"
    assert slow.candidate.compression == "bf16"
    # A random deal of few sequences to many ranks, and nothing else to wait for.
    work = Workload(LARGE, wikipedia_lengths(), 512, 10, strategy="random")
    device = card_device(CARDS["a100-80"], work)
    cluster = Cluster(8, Link(0, 1e15), Link(0, 1e15))
    random = best(Planner(work, device, cluster), 64, Allowed())
    assert random.shares["stragglers"] > 0.25
    even = best(Planner(replace(work, strategy="stratified"), device, cluster), 64, Allowed())
    assert even.time.straggler < random.time.straggler


def test_candidates():
    assert list(candidates(3, 8, 256, ALL)) == []
    found = list(candidates(2, 4, 96, ALL))
    assert len(found) == len(set(found)) == 6 * (3 * 3 + 1) * 3
    assert {one.batch * one.accumulation for one in found} == {12}
    alone = list(candidates(1, 1, 8, ALL))
    assert {(one.compression, one.shard, one.local_sgd_period) for one in alone} == {
        ("none", "none", 1)
    }
    assert {one.shard for one in candidates(1, 4, 8, ALL)} == {"none", "node"}
    assert {one.shard for one in candidates(4, 1, 8, ALL)} == {"none", "world"}
    planner = large_on("a100-80", network_link("1G", 4))
    ways = alternatives(planner, 2, Allowed())
    assert [(way.candidate.compression, way.candidate.local_sgd_period) for way in ways] == [
        ("none", 1),
        ("bf16", 1),
        ("power_sgd", 1),
        ("none", 8),
    ]
    why = why_none(planner, 3, Allowed())
    assert why == "a global batch of 512 does not divide by 12 ranks; 516 would"
