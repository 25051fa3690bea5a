"""Epoch plans: each example once, equal work, the same plan on every rank."""

import random
import threading
import time

import numpy as np
import pytest

from bert_unpad import _balancer
from bert_unpad.data.sampling.balanced_sampler import WorkModel, efficiency
from bert_unpad.data.sampling.histogram import sample_lengths
from tests.support.epoch_plans import BERT_LARGE, batches, global_batches, make_epoch_plan
from tests.support.seeds import derived

STRATEGIES = [
    *("stratified", "random", "quotas"),
    *("random/world/plain", "random/node/snake", "quotas/node/plain", "quotas/world/lpt"),
]


def random_cases(count, seed):
    """(lengths, num_replicas, batch_size, pool_steps), many with remainders or few examples."""
    rng = random.Random(derived(seed))
    for _ in range(count):
        replicas, batch, pool = rng.randint(1, 9), rng.randint(1, 7), rng.randint(1, 9)
        most = replicas * batch * rng.choice([1, 3, 20])
        longest = rng.choice([0, 1, 40, 512, 65_535])
        lengths = [rng.randint(0, longest) for _ in range(rng.randint(1, most))]
        yield np.array(lengths, np.uint16), replicas, batch, pool


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_example_once_and_equal_counts(strategy):
    for lengths, replicas, batch, pool in random_cases(300, seed=1):
        plan = make_epoch_plan(lengths, replicas, batch, strategy, pool_steps=pool)
        assert plan.num_examples == len(lengths)
        assert plan.steps == -(-len(lengths) // (replicas * batch))
        ranks = batches(plan, replicas)
        seen = np.concatenate([indices for steps in ranks for indices in steps])
        np.testing.assert_array_equal(np.sort(seen), np.arange(len(lengths)))
        for steps in ranks:
            assert all(len(indices) == batch for indices in steps[:-1])
            for indices in steps:
                assert (np.diff(lengths[indices].astype(int)) <= 0).all(), "longest first"
        in_last = [len(steps[-1]) for steps in ranks]
        assert max(in_last) - min(in_last) <= 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_any_range_of_steps_is_a_part_of_the_whole(strategy):
    rng = random.Random(derived(2))
    for lengths, replicas, batch, pool in random_cases(60, seed=2):
        plan = make_epoch_plan(lengths, replicas, batch, strategy, pool_steps=pool)
        whole = batches(plan, replicas)
        first = rng.randint(0, plan.steps)
        last = rng.randint(first, plan.steps)
        for part, full in zip(batches(plan, replicas, first, last), whole, strict=True):
            assert len(part) == last - first
            for mine, theirs in zip(part, full[first:last], strict=True):
                np.testing.assert_array_equal(mine, theirs)
        # Blocks follow each other without gap or overlap.
        step = 0
        while step < plan.steps:
            assert all(plan.block(at) == plan.block(step) for at in range(*plan.block(step)))
            assert plan.block(step)[0] == step
            step = plan.block(step)[1]
        assert step == plan.steps


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_plan_is_a_function_of_its_arguments(strategy):
    lengths = sample_lengths(3000, seed=3)

    def plan_with(**options):
        return np.concatenate(
            [part for steps in batches(make_epoch_plan(lengths, 4, 8, strategy, **options), 4)
             for part in steps]
        )  # fmt: skip

    first = plan_with()
    np.testing.assert_array_equal(first, plan_with())
    for other in ({"seed": 6}, {"epoch": 1}, {"segment": 1}):
        assert (plan_with(**other) != first).mean() > 0.9, other


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_work_and_remaining_follow_from_the_batches(strategy):
    rng = random.Random(derived(4))
    for lengths, replicas, batch, pool in random_cases(60, seed=4):
        model = WorkModel(rng.random(), rng.random() / 100)
        plan = make_epoch_plan(lengths, replicas, batch, strategy, pool_steps=pool, work=model)
        ranks = batches(plan, replicas)
        s = lengths.astype(float)
        work = model.linear * s + model.quadratic * s**2
        expected = [[work[steps[step]].sum() for steps in ranks] for step in range(plan.steps)]
        found = plan.work(0, plan.steps)
        assert found.shape == (plan.steps, replicas)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=work.max() * 1e-7 * batch)

        done = rng.randint(0, plan.steps)
        met = [indices for steps in ranks for indices in steps[:done]]
        expected_left = np.setdiff1d(np.arange(len(lengths)), np.concatenate([[], *met]))
        np.testing.assert_array_equal(plan.remaining(done), expected_left)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_population_limits_the_plan_to_some_examples(strategy):
    rng = np.random.default_rng(derived(5))
    for lengths, replicas, batch, pool in random_cases(60, seed=5):
        population = np.flatnonzero(rng.random(len(lengths)) < 0.6).astype(np.uint32)
        if len(population) == 0:
            continue
        plan = make_epoch_plan(
            lengths, replicas, batch, strategy, pool_steps=pool, population=population
        )
        seen = np.concatenate([part for steps in batches(plan, replicas) for part in steps])
        np.testing.assert_array_equal(np.sort(seen), population)
        assert len(plan.remaining(0)) == len(population)


def test_random_global_batches_do_not_depend_on_the_number_of_ranks():
    lengths = sample_lengths(1000, seed=6)
    whole = global_batches(make_epoch_plan(lengths, 1, 24, "random"), 1)
    for replicas in (2, 3, 8, 24):
        parts = global_batches(
            make_epoch_plan(lengths, replicas, 24 // replicas, "random"), replicas
        )
        for one, other in zip(whole, parts, strict=True):
            np.testing.assert_array_equal(np.sort(one), np.sort(other))


def test_random_is_a_uniform_permutation():
    # The place of example 0 among 6, over 6,000 epochs: each place 1,000 times, sigma 29.
    places = np.zeros(6)
    for epoch in range(6000):
        plan = make_epoch_plan([1] * 6, 1, 1, "random", epoch=epoch)
        places[plan.rank_steps(0, 0, 6)[0].tolist().index(0)] += 1
    assert np.abs(places - 1000).max() < 5 * 29


@pytest.mark.parametrize(
    ("ranks", "batch", "least"),
    [(1024, 16, 0.998), (1368, 12, 0.996), (8, 56, 0.999), (2, 8, 0.99), (4096, 4, 0.996)],
)
def test_stratified_efficiency_on_wikipedia_lengths(ranks, batch, least):
    lengths = sample_lengths(2**20, seed=7)
    plan = make_epoch_plan(lengths, ranks, batch, pool_steps=64)
    assert efficiency(plan.work(0, plan.steps)).mean() >= least


def test_stratified_efficiency_where_steps_cannot_be_equal():
    # Batches of one and two: no rank waits only if all ranks run alike steps at the same time.
    lengths = sample_lengths(2**16, seed=8)
    for batch in (1, 2):
        plan = make_epoch_plan(lengths, 32, batch, pool_steps=64)
        assert efficiency(plan.work(0, plan.steps)).mean() >= 0.995


def test_stratified_follows_the_work_model():
    lengths = sample_lengths(2**16, seed=9)
    quadratic = WorkModel(0, 1)
    own = make_epoch_plan(lengths, 16, 8, work=quadratic, pool_steps=64)
    assert efficiency(own.work(0, own.steps)).mean() >= 0.998
    # A plan for linear work leaves quadratic work unequal, so the model does make a difference.
    linear = make_epoch_plan(lengths, 16, 8, work=WorkModel(1, 0), pool_steps=64)
    squares = np.array(
        [[(lengths[part].astype(float) ** 2).sum() for part in steps]
         for steps in batches(linear, 16)]
    )  # fmt: skip
    assert efficiency(squares.T).mean() < 0.99


def test_stratified_global_batches_have_the_lengths_of_the_whole():
    lengths = sample_lengths(2**18, seed=10)
    whole = np.cumsum(np.bincount(lengths, minlength=513)) / len(lengths)

    def distance(strategy):
        """Kolmogorov-Smirnov distance between a step's lengths and all lengths, mean over steps."""
        plan = make_epoch_plan(lengths, 256, 16, strategy, pool_steps=64)
        return np.mean(
            [
                np.abs(
                    np.cumsum(np.bincount(lengths[step], minlength=513)) / len(step) - whole
                ).max()
                for step in global_batches(plan, 256)
            ]
        )

    assert distance("stratified") < distance("random")


def test_stratified_tail_is_drawn_from_all_lengths():
    # 64 examples of 1,000 are left for the last step. Each example has the same chance to be there.
    lengths = np.sort(sample_lengths(1000, seed=11))
    hits = np.zeros(1000)
    for epoch in range(500):
        plan = make_epoch_plan(lengths, 4, 18, epoch=epoch)
        last = [plan.rank_steps(rank, plan.steps - 1, plan.steps)[0] for rank in range(4)]
        hits[np.concatenate(last)] += 1
    expected = hits.sum() / 1000
    assert expected == 500 * (1000 % 72) / 1000
    quarters = hits.reshape(4, 250).sum(axis=1)
    np.testing.assert_allclose(quarters, expected * 250, rtol=0.02)


def test_ranks_get_their_share_of_every_length():
    lengths = sample_lengths(2**15, seed=12)
    plan = make_epoch_plan(lengths, 8, 16)
    for steps in batches(plan, 8):
        mine = np.sort(lengths[np.concatenate(steps)])
        # One of every 8 in sorted order, give or take a row.
        np.testing.assert_allclose(mine.mean(), lengths.mean(), rtol=1e-3)
        np.testing.assert_allclose(np.median(mine), np.median(lengths), atol=2)


def test_planning_releases_the_gil():
    lengths = sample_lengths(3_000_000, seed=13)
    worker = threading.Thread(target=lambda: make_epoch_plan(lengths, 8, 16).work(0, 20_000))
    worker.start()
    turns = 0
    while worker.is_alive():
        time.sleep(0.002)
        turns += 1
    assert turns >= 10


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"lengths": np.zeros(0, np.uint16)}, ValueError, "lengths"),
        ({"lengths": np.zeros(3, np.int64)}, TypeError, "lengths"),
        ({"lengths": np.zeros((3, 2), np.uint16)}, TypeError, "lengths"),
        ({"lengths": np.zeros(6, np.uint16)[::2]}, TypeError, "lengths"),
        ({"strategy": "sorted"}, ValueError, "strategy"),
        ({"strategy": "random/world"}, ValueError, "strategy"),
        ({"strategy": "random/all/snake"}, ValueError, "strategy"),
        ({"strategy": "quotas/node/best/lpt"}, ValueError, "strategy"),
        ({"strategy": "random/node/lpt", "exchange_ranks": 0}, ValueError, "exchange_ranks"),
        ({"num_replicas": 0}, ValueError, "num_replicas"),
        ({"batch_size": -1}, ValueError, "batch_size"),
        ({"pool_steps": 0}, ValueError, "pool_steps"),
        ({"population": np.zeros(0, np.uint32)}, ValueError, "population"),
        ({"population": np.array([3], np.uint32)}, ValueError, "population"),
        ({"population": np.array([1, 1], np.uint32)}, ValueError, "population"),
        ({"population": np.array([1], np.int64)}, TypeError, "population"),
        ({"work": WorkModel(1e307, 0)}, ValueError, "work"),
    ],
)
def test_bad_arguments_are_named(change, error, named):
    arguments = {
        "lengths": np.full(3, 100, np.uint16),
        "strategy": "stratified",
        "num_replicas": 2,
        "batch_size": 1,
        "seed": 0,
        "epoch": 0,
        "work": BERT_LARGE,
        "pool_steps": 4,
    } | change
    with pytest.raises(error, match=f"^{named}"):
        _balancer.EpochPlan(arguments.pop("lengths"), **arguments)


def test_bad_ranges_are_refused():
    plan = make_epoch_plan([5] * 10, 2, 2)
    with pytest.raises(ValueError, match="rank"):
        plan.rank_steps(2, 0, 1)
    for first, last in ((-1, 1), (2, 1), (0, 4)):
        with pytest.raises(ValueError, match="first, last"):
            plan.rank_steps(0, first, last)
        with pytest.raises(ValueError, match="first, last"):
            plan.work(first, last)
    with pytest.raises(ValueError, match="first, last"):
        plan.block(3)
    with pytest.raises(ValueError, match="first, last"):
        plan.remaining(4)


def test_work_model():
    # BERT-large at length 512: attention is 1/13 of a layer, the share the FLOP formula gives.
    attention = BERT_LARGE.quadratic * 512**2
    assert attention / BERT_LARGE(512) == pytest.approx(512 / (512 + 6 * 1024))
    assert WorkModel(2, 3)(10) == 320
    for linear, quadratic in ((0, 0), (-1, 1), (1, -1), (float("nan"), 1), (float("inf"), 1)):
        with pytest.raises(ValueError, match="work"):
            WorkModel(linear, quadratic)
    with pytest.raises(ValueError, match="hidden"):
        WorkModel.for_hidden(0)
