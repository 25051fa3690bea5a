"""The planner's models: cards and links, buckets, memory, the time of an update, the choice."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks.lib.saved_activations import saved_by
from bert_unpad.costs.cards import find_card
from bert_unpad.costs.gradient_buckets import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    fill_buckets,
    gradients,
)
from bert_unpad.costs.memory import layer_bytes_per_token, memory_of
from bert_unpad.costs.sync import exposed_seconds, power_sgd_bytes, wire_bytes
from bert_unpad.costs.timing import random_inputs
from bert_unpad.costs.workload import cap_lengths
from bert_unpad.data.sampling.histogram import wikipedia_lengths
from bert_unpad.nn import BertConfig, BertForPreTraining
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
    network_link,
)
from bert_unpad.plan.candidates import RECOMPUTE, candidates
from bert_unpad.plan.choose import why_none
from bert_unpad.simulate import Cluster, ComputeCost, Link
from tests.support.paths import ROOT

BASE, LARGE = (BertConfig(**PRESETS[name]) for name in ("bert-base", "bert-large"))
TINY = BertConfig(
    vocab_size=64,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=64,
)
ALL = Allowed(("none", "bf16", "power_sgd"), local_sgd_periods=(1, 8))


def all_of(length: int) -> np.ndarray:
    counts = np.zeros(length + 1, np.int64)
    counts[length] = 1
    return counts


def large_on(card: str, nodes_link: Link, batch: int = 512, **changes) -> Planner:
    work = Workload(LARGE, wikipedia_lengths(), batch, 1000)
    device = replace(card_device(CARDS[card], work), **changes)
    return Planner(work, device, Cluster(4, intra_node_link("pcie"), nodes_link))


def test_cards_without_kernels_are_refused():
    assert find_card("h100").peak("bf16") == pytest.approx(989e12)
    for name in ("v100", "t4", "rtx2080ti"):
        with pytest.raises(ValueError, match=r"argument --card: .*CUDA operators need 8\.0"):
            find_card(name)
    with pytest.raises(ValueError, match="argument --card: expected one of a100-40"):
        find_card("a100")
    assert all(card.has_bf16 for card in CARDS.values() if card.is_supported)


def test_links():
    link = network_link("10G", 8, adapters=2)
    assert link.bandwidth == pytest.approx(10e9 / 8 * 0.94 * 2 / 8)
    assert link.latency == 30e-6
    slow = network_link("100M", 1, latency=1e-6)
    assert (slow.latency, slow.bandwidth) == (1e-6, pytest.approx(0.94 * 12.5e6))
    assert network_link("IB", 1).bandwidth == pytest.approx(25e9 * 0.94)
    assert intra_node_link("25").bandwidth == 25e9
    for name in ("10", "0G", "fast", "-1G", "10Gb"):
        with pytest.raises(ValueError, match="argument --network: expected a rate"):
            network_link(name, 1)
    for name in ("sli", "0", "-3", "nan"):
        with pytest.raises(ValueError, match="argument --intra-node: expected nvlink"):
            intra_node_link(name)


def test_gradients_are_those_of_the_model_and_buckets_those_of_ddp():
    found = gradients(TINY, 0.25)
    with torch.device("meta"):
        model = BertForPreTraining(TINY)
    assert sorted(g.shape for g in found) == sorted(tuple(p.shape) for p in model.parameters())
    ready = [gradient.ready for gradient in found]
    assert ready == sorted(ready)
    assert ready[-1] == 1 == found[-5].ready
    shapes = gradients(BASE, 0.1)
    tensors = [torch.empty(gradient.shape) for gradient in shapes]
    for limits in ((FIRST_BUCKET_BYTES, BUCKET_BYTES), (2**22, 2**22)):
        indices, _ = dist._compute_bucket_assignment_by_size(tensors, list(limits))
        ours = fill_buckets(shapes, limits[1], limits[0])
        assert [len(bucket.gradients) for bucket in ours] == [len(part) for part in indices]
        assert sum(bucket.numel for bucket in ours) == sum(t.numel() for t in tensors)


def test_power_sgd_sends_thin_matrices():
    shapes = gradients(BASE, 0.1)
    whole, ps, qs = power_sgd_bytes(shapes)
    matrices = [g.shape for g in shapes if len(g.shape) == 2 and min(g.shape) > 2]
    assert ps == 4 * 2 * sum(rows for rows, _ in matrices)
    assert qs == 4 * 2 * sum(columns for _, columns in matrices)
    # The token types' two rows are no smaller as a product.
    assert whole == 4 * sum(g.numel for g in shapes if g.shape not in matrices)
    buckets = fill_buckets(shapes)
    assert wire_bytes(buckets, "power_sgd") == whole + ps + qs
    assert wire_bytes(buckets, "none") == 2 * wire_bytes(buckets, "bf16")


def test_layers_keep_what_was_counted():
    path = ROOT / "benchmarks/results/cpu/memory.json"
    rows = [r for r in json.loads(path.read_text())["results"] if "bert_unpad" in r["contender"]]
    assert len(rows) == 12
    for row in rows:
        config = {"base": BASE, "large": LARGE}[row["size"]]
        precision = {"float32": "fp32", "bfloat16": "bf16"}[row["dtype"]]
        recompute = row["contender"].split()[-1]
        assert layer_bytes_per_token(config, precision, recompute) == row["bytes_per_token"]


def test_memory_covers_what_a_whole_model_keeps():
    config = replace(TINY, hidden_size=64, intermediate_size=256, num_hidden_layers=4)
    work = Workload(config, all_of(64), 16, 1, precision="fp32")
    model = BertForPreTraining(config).train()
    inputs = random_inputs(config, [64] * 16)
    for recompute in RECOMPUTE:
        model.bert.encoder.recompute = recompute
        kept = saved_by(lambda: sum(model(inputs)[::2]), model).activations
        memory = memory_of(work, Candidate(1, 16, recompute=recompute), 1)
        ours = memory.activations + memory.logits
        assert kept < ours
        # What is not kept: what the backward pass of a layer needs besides, and with `layer` all
        # that this one keeps, out of only four layers.
        assert ours < kept * {"none": 1.5, "gelu": 1.6, "layer": 8}[recompute]


def test_memory_of_the_state():
    work = Workload(BASE, wikipedia_lengths(), 64, 1)
    plain = memory_of(work, Candidate(2, 4), 1)
    assert plain.state == pytest.approx(work.parameters * (4 + 2 + 4 + 8))
    state = [memory_of(work, Candidate(2, 4), sharers).state for sharers in (1, 2, 4, 8, 16)]
    assert plain.state - state[1] == pytest.approx(work.parameters * 4)
    assert state == sorted(state, reverse=True)
    assert state[-1] == state[-2]  # a rank has at least the word embedding
    assert work.shard_share(16) == pytest.approx(30528 * 768 / work.parameters)
    assert memory_of(work, Candidate(2, 4, compression="power_sgd"), 1).state > plain.state
    kept = [memory_of(work, Candidate(2, 4, recompute=r), 1).activations for r in RECOMPUTE]
    assert kept == sorted(kept, reverse=True)
    more = memory_of(work, Candidate(2, 8), 1)
    assert plain.activations < more.activations < 2 * plain.activations  # batches even out


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
    # One rank exchanges nothing.
    assert planner.update_time(Candidate(1, 16)).network == 0


def test_the_backward_pass_hides_all_but_the_last_buckets():
    buckets = fill_buckets(gradients(BASE, 0.1))
    cluster = Cluster(1, network=Link(0, 1e9))
    seconds = [cluster.allreduce(4 * bucket.numel, 4) for bucket in buckets]
    last = [time for time, bucket in zip(seconds, buckets, strict=True) if bucket.ready > 0.999]
    assert exposed_seconds(buckets, 1e3, cluster, 4, "none") == pytest.approx(sum(last), rel=1e-3)
    assert exposed_seconds(buckets, 0, cluster, 4, "none") == pytest.approx(sum(seconds))
    assert len(last) < 3 < len(buckets)
    assert buckets[-1].numel > 23e6  # the word embedding's


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
    # More passes of the same update cost no more than adding up their gradients.
    one, four = (planners[0].update_time(Candidate(1, 128 // n, n)) for n in (1, 4))
    assert four.compute - one.compute == pytest.approx(3 * planners[0].device.accumulate)


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
    # Little memory costs passes computed again, or an exchange of weights: it is named.
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
    assert random.shares["stragglers"] > 0.3
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


def test_workloads_are_checked():
    counts = all_of(64)
    np.testing.assert_array_equal(cap_lengths(np.array([0, 1, 2, 3, 4]), 2), [0, 1, 9])
    assert cap_lengths(counts, 64) is counts
    for changes, message in (
        ({"global_batch": 0}, "global_batch: expected 1 or more"),
        ({"updates": -1}, "updates: expected 1 or more"),
        ({"precision": "fp8"}, "precision: expected one of bf16, fp16, fp32"),
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
