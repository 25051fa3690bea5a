"""The simulator's cost models: computing, collectives, overlap, exchanges, scaling, and the fit."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from bert_unpad._balancer import Plan, WorkModel
from bert_unpad.costs.step import num_parameters
from bert_unpad.costs.timing import default_batches, fit_step_cost, random_inputs
from bert_unpad.data.sampling.histogram import sample_lengths, wikipedia_lengths
from bert_unpad.nn import BertConfig, BertForPreTraining
from bert_unpad.nn.config import PRESETS
from bert_unpad.nn.flops import training_flops
from bert_unpad.simulate import (
    Cluster,
    ComputeCost,
    Link,
    Overlap,
    StepModel,
    scaling_curve,
    simulate,
)
from bert_unpad.simulate.cli import main
from bert_unpad.simulate.epoch import EXAMPLE_BYTES, LENGTH_BYTES, TOKEN_BYTES

TINY = BertConfig(
    vocab_size=64,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=64,
)


@pytest.mark.parametrize("truth", [(3e-6, 2e-9, 1e-3), (3e-6, 0, 0), (0, 1e-9, 0), (1e-6, 0, 2.0)])
def test_fit_finds_the_coefficients_of_exact_times(truth):
    batches = default_batches(512)
    cost = ComputeCost(*truth)
    found = ComputeCost.fit(batches, [cost.seconds(lengths) for lengths in batches])
    np.testing.assert_allclose(
        (found.linear, found.quadratic, found.fixed), truth, rtol=1e-6, atol=1e-12
    )


def test_fit_is_never_negative_and_close_under_noise():
    rng = np.random.default_rng(0)
    batches = default_batches(512)
    for _ in range(20):
        cost = ComputeCost(2e-6, 3e-10, 1e-4)
        seconds = [cost.seconds(b) * rng.uniform(1, 1.05) for b in batches]
        found = ComputeCost.fit(batches, seconds)
        for lengths in batches:
            assert found.seconds(lengths) == pytest.approx(cost.seconds(lengths), rel=0.06)


def test_fit_refuses_what_it_cannot_use():
    with pytest.raises(ValueError, match="seconds: expected one for each of 3 or more"):
        ComputeCost.fit([[1], [2]], [1.0, 2.0])
    with pytest.raises(ValueError, match="seconds: expected numbers above 0"):
        ComputeCost.fit([[1], [2], [3]], [1.0, 0.0, 2.0])
    with pytest.raises(ValueError, match="linear, quadratic"):
        ComputeCost(0, 0, 1)


def test_cost_files(tmp_path):
    cost = ComputeCost(1.5e-6, 2.5e-9, 1e-3)
    path = tmp_path / "cost.json"
    cost.save(path, machine="here")
    assert ComputeCost.load(path) == cost
    assert json.loads(path.read_text())["machine"] == "here"
    for text in ("no json", "{}", '{"format": "other"}', "[]"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"cost\.json: expected a file of"):
            ComputeCost.load(path)


def test_cost_of_a_rate_is_that_of_the_flops():
    config = BertConfig(**PRESETS["bert-large"])
    cost = ComputeCost.from_rate(config, 1e12)
    lengths = [512, 300, 100, 40]
    assert cost.seconds(lengths) == pytest.approx(training_flops(config, lengths) / 1e12, rel=1e-3)


def test_number_of_parameters():
    assert num_parameters(TINY) == sum(p.numel() for p in BertForPreTraining(TINY).parameters())
    assert num_parameters(BertConfig(**PRESETS["bert-large"])) == pytest.approx(336e6, rel=0.01)


def test_link_formulas():
    link = Link(latency=1e-5, bandwidth=1e9)
    assert link.ring_allreduce(8e6, 4) == pytest.approx(2 * 3 * 1e-5 + 2 * 3 / 4 * 8e-3)
    assert link.tree_allreduce(8e6, 5) == pytest.approx(2 * 3 * 1e-5 + 2 * 8e-3)
    assert link.ring_allreduce(8e6, 1) == link.tree_allreduce(8e6, 1) == 0
    assert Link(0, 1e9).reduce_scatter(8e6, 4) == pytest.approx(3 / 4 * 8e-3)
    for arguments, name in (((-1, 1), "latency"), ((0, 0), "bandwidth")):
        with pytest.raises(ValueError, match=name):
            Link(*arguments)


def test_allreduce_is_hierarchical():
    node, network = Link(1e-6, 100e9), Link(1e-5, 10e9)
    ring = Cluster(4, node, network, "ring")
    size = 1e8
    inside = 2 * 3 * (1e-6 + size / 4 / 100e9)
    outside = 2 * 7 * (1e-5 + size / 4 / 8 / 10e9)
    assert ring.allreduce(size, 32) == pytest.approx(inside + outside)
    assert ring.allreduce(size, 4) == pytest.approx(inside)  # one node
    assert ring.allreduce(size, 1) == 0
    assert ring.allreduce(size, 2) == pytest.approx(2 * (1e-6 + size / 2 / 100e9))
    # Many ranks and few bytes: latency decides, and a tree has less of it.
    best, tree = Cluster(4, node, network), Cluster(4, node, network, "tree")
    assert best.allreduce(1e4, 4096) == tree.allreduce(1e4, 4096) < ring.allreduce(1e4, 4096)
    assert best.allreduce(1e9, 32) == ring.allreduce(1e9, 32) < tree.allreduce(1e9, 32)
    with pytest.raises(ValueError, match="ranks: expected a multiple of ranks_per_node"):
        ring.allreduce(size, 6)


@pytest.mark.parametrize("compute", [0.0, 0.01, 0.3, 1.0, 5.0])
def test_overlap_is_that_of_buckets_one_by_one(compute):
    cluster = Cluster(2, Link(1e-5, 1e9), Link(1e-4, 2e8))
    overlap = Overlap(gradient_bytes=1e8, bucket_bytes=1.1e7)
    buckets = math.ceil(1e8 / 1.1e7)
    one, end = cluster.allreduce(1e8 / buckets, 8), 0.0
    for i in range(buckets):  # DDP's schedule, step by step
        full = compute / 3 + compute * 2 / 3 * (i + 1) / buckets
        end = max(end, full) + one
    assert overlap.exposed(compute, cluster, 8) == pytest.approx(end - compute)
    assert overlap.exposed([compute, compute], cluster, 1).tolist() == [0, 0]
    bare = Overlap(gradient_bytes=1e8, overlapped=False)
    assert bare.exposed(compute, cluster, 8) == pytest.approx(cluster.allreduce(1e8, 8))


@pytest.mark.parametrize("strategy", ["random/group/lpt", "random/world/snake", "quotas/world/lpt"])
def test_received_is_what_the_plans_of_all_ranks_say(strategy):
    lengths = sample_lengths(500, seed=5)
    ranks, batch, node = 10, 7, 4  # neither whole nodes nor a full last step
    options = {"seed": 3, "epoch": 0, "work": WorkModel(1, 0.01), "pool_steps": 4}
    options |= {"num_replicas": ranks, "batch_size": batch, "exchange_ranks": node}
    plan = Plan(lengths, strategy=strategy, **options)
    drawn = Plan(lengths, strategy=strategy.split("/")[0], **options)  # before the exchange
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
    plan = Plan(
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


def test_random_inputs_are_a_batch_of_these_lengths():
    inputs = random_inputs(TINY, [20, 7, 1], seed=1)
    assert inputs.batch.lengths.tolist() == [20, 7, 1]
    assert inputs.num_masked == 3 + 1 + 0
    assert int(inputs.input_ids.max()) < TINY.vocab_size


def test_fit_of_a_real_model(tmp_path, capsys):
    with pytest.raises(ValueError, match="rounds: expected 1 or more"):
        fit_step_cost(TINY, rounds=0)
    path, config = tmp_path / "cost.json", tmp_path / "config.json"
    config.write_text(json.dumps(TINY.to_dict()))
    assert main([f"--model={config}", f"--fit={path}"]) == 0
    assert capsys.readouterr().out == ""
    stored = json.loads(path.read_text())
    assert stored["threads"] == torch.get_num_threads()
    assert [timing["tokens"] for timing in stored["timings"]] == [64] * 4 + [256] * 4
    assert all(timing["seconds"] > 0 for timing in stored["timings"])
    given = [f"--model={config}", "--ranks=2", "--batch=2", "--samples=50", "--no-scaling"]
    assert main([*given, f"--cost={path}", "--json"]) == 0
    setup = json.loads(capsys.readouterr().out)["setup"]
    assert setup["cost"]["linear"] == stored["linear"]
    assert setup["overlap"]["gradient_bytes"] == 4 * num_parameters(TINY)
