"""Strategies of the balancer that draw global batches first and may then exchange examples."""

import numpy as np
import pytest

from bert_unpad._balancer import deal
from bert_unpad.data.sampling.balanced_sampler import WorkModel, efficiency
from bert_unpad.data.sampling.histogram import sample_lengths
from tests.support.epoch_plans import batches, make_epoch_plan
from tests.support.seeds import derived


def test_quotas_give_every_rank_equally_many_of_a_length():
    lengths = sample_lengths(8 * 16 * 30, seed=8)
    shares = np.bincount((lengths - 1) // 128, minlength=4) / len(lengths)
    plan = make_epoch_plan(lengths, 8, 16, "quotas")
    for steps in zip(*batches(plan, 8, 0, 28), strict=True):
        counts = [np.bincount((lengths[part] - 1) // 128, minlength=4) for part in steps]
        assert all((count == counts[0]).all() for count in counts)
        assert np.abs(counts[0] - 16 * shares).max() < 1.5


def test_an_exchange_stays_within_its_group_of_ranks():
    lengths = sample_lengths(12 * 4 * 10, seed=9)
    before = batches(make_epoch_plan(lengths, 12, 4, "random"), 12)
    for dealing in ("plain", "snake", "lpt"):
        after = batches(
            make_epoch_plan(lengths, 12, 4, f"random/node/{dealing}", exchange_ranks=5), 12
        )
        for step in range(10):
            for ranks in (range(5), range(5, 10), range(10, 12)):
                mine, theirs = (
                    np.sort(np.concatenate([plan[rank][step] for rank in ranks]))
                    for plan in (before, after)
                )
                np.testing.assert_array_equal(mine, theirs)


# What such schemes were found to reach on Wikipedia's lengths, counted in tokens.
@pytest.mark.parametrize(
    ("strategy", "large", "small"),
    [
        ("random/world/plain", 0.944, 0.985),
        ("random/world/snake", 0.9965, 0.9986),
        ("quotas", 0.910, 0.976),
        ("quotas/node/snake", 0.961, 0.9986),
    ],
)
def test_schemes_that_draw_first(strategy, large, small):
    lengths = sample_lengths(2**20, seed=1)
    for ranks, batch, expected in ((1024, 16, large), (8, 56, small)):
        plan = make_epoch_plan(lengths, ranks, batch, strategy, work=WorkModel(1, 0))
        found = efficiency(plan.work(0, plan.steps - 1)).mean()
        assert found == pytest.approx(expected, abs=0.01)


def test_lpt_balances_better_than_snake():
    lengths = sample_lengths(2**18, seed=2)
    best = [make_epoch_plan(lengths, 1024, 16, f"random/world/{how}") for how in ("lpt", "snake")]
    lpt, snake = (efficiency(plan.work(0, plan.steps - 1)).mean() for plan in best)
    assert lpt > 0.998 > snake


@pytest.mark.parametrize("dealing", ["plain", "snake", "lpt"])
def test_a_step_read_by_the_ranks_is_dealt_as_a_drawn_one_is(dealing):
    lengths = sample_lengths(12 * 8, seed=3)
    drawn = batches(make_epoch_plan(lengths, 12, 8, "random"), 12)
    order = np.concatenate([drawn[rank][0] for rank in range(12)])
    counts = np.full(12, 8)
    for group in (12, 4, 5):
        given = deal(
            lengths[order], counts, dealing=dealing, group_ranks=group, work=WorkModel(1, 0.01)
        )
        for first in range(0, 12, group):
            ranks = range(first, min(first + group, 12))
            held = np.isin(np.arange(96) // 8, ranks)
            assert np.isin(given[held], ranks).all()
            assert (np.bincount(given[held])[first:] == 8).all()
        if group == 12:
            plan = make_epoch_plan(
                lengths, 12, 8, f"random/world/{dealing}", work=WorkModel(1, 0.01)
            ).work(0, 1)
            work = [WorkModel(1, 0.01)(float(length)) for length in lengths[order]]
            np.testing.assert_allclose(np.bincount(given, work), plan[0])


def test_dealing_copes_with_ranks_that_have_little_or_nothing():
    lengths = np.array([30, 7, 7, 500, 12], np.uint16)
    given = deal(
        lengths, np.array([1, 0, 4, 0]), dealing="lpt", group_ranks=4, work=WorkModel(1, 0)
    )
    assert given[3] == 0  # the longest to the first, one each, the lightest where there is room
    assert sorted(np.bincount(given, minlength=4)) == [1, 1, 1, 2]
    none = np.empty(0, np.uint16)
    counts = np.zeros(3, np.int64)
    assert not len(deal(none, counts, dealing="snake", group_ranks=3, work=WorkModel(1, 0)))


def test_greedy_dealing_evens_out_small_batches():
    """Within what list scheduling guarantees: the greatest is at most the mean and the longest."""
    work = WorkModel(1, 0)
    for step in range(50):
        lengths = sample_lengths(8 * 4, seed=step)
        sums = {}
        for dealing in ("lpt", "greedy"):
            given = deal(lengths, np.full(8, 4), dealing=dealing, group_ranks=8, work=work)
            sums[dealing] = np.bincount(given, lengths, minlength=8)
        assert sums["greedy"].max() <= sums["lpt"].max()
        assert sums["greedy"].max() <= lengths.sum() / 8 + lengths.max()
        assert sums["greedy"].max() - sums["greedy"].min() <= lengths.max()
    with pytest.raises(ValueError, match="strategy: "):
        make_epoch_plan(lengths, 8, 4, "random/world/greedy")


def test_each_example_goes_to_the_rank_that_would_be_done_first():
    rng, work = np.random.default_rng(derived(0)), WorkModel(1, 0.01)
    for _ in range(50):
        ranks = int(rng.integers(1, 6))
        lengths = rng.integers(0, 600, rng.integers(0, 40)).astype(np.uint16)
        counts = np.bincount(rng.integers(0, ranks, len(lengths)), minlength=ranks)
        speeds = rng.uniform(0.1, 3, ranks)
        how = {"dealing": "greedy", "group_ranks": ranks, "work": work}
        given = deal(lengths, counts, speeds=speeds, **how)
        load = np.zeros(ranks)
        for i in np.argsort(-lengths.astype(int), kind="stable"):
            done = (load + work(float(lengths[i]))) / speeds
            assert done[given[i]] <= done.min() * (1 + 1e-9)
            load[given[i]] += work(float(lengths[i]))
        alike = deal(lengths, counts, speeds=np.full(ranks, 0.3), **how)
        np.testing.assert_array_equal(alike, deal(lengths, counts, **how))


def test_speeds_count_within_groups():
    lengths, speeds = np.full(40, 100, np.uint16), np.array([3.0, 1.0, 1.0, 1.0])
    given = deal(
        *(lengths, np.full(4, 10)),
        dealing="greedy",
        group_ranks=2,
        work=WorkModel(1, 0),
        speeds=speeds,
    )
    np.testing.assert_array_equal(np.bincount(given), [15, 5, 10, 10])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dealing": "lpt", "speeds": np.ones(2)}, "speeds: "),
        ({"dealing": "greedy", "speeds": np.ones(3)}, "speeds: .* 2 ranks, got 3"),
        ({"dealing": "greedy", "speeds": np.array([1.0, 0.0])}, "speeds: "),
        ({"dealing": "greedy", "speeds": np.array([1.0, np.nan])}, "speeds: "),
        ({"counts": np.array([2, 2])}, "counts: "),
        ({"counts": np.array([6, -1])}, "counts: "),
        ({"dealing": "fair"}, "dealing: "),
        ({"group_ranks": 0}, "group_ranks: "),
    ],
)
def test_dealing_names_a_bad_argument(change, message):
    good = {
        "lengths": np.arange(1, 6, dtype=np.uint16),
        "counts": np.array([3, 2]),
        "dealing": "lpt",
        "group_ranks": 2,
        "work": WorkModel(1, 0),
    }
    deal(**good)
    with pytest.raises(ValueError, match=message):
        deal(**(good | change))
