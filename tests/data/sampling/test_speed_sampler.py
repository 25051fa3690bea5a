"""Ranks of unequal speed: the same global batches, each example once, work in proportion."""

import json

import numpy as np
import pytest

from bert_unpad.data import BalancedSampler, PackedSampler, SpeedSampler
from bert_unpad.data.sampling.balanced_sampler import WorkModel
from bert_unpad.data.sampling.histogram import sample_lengths

WORK = WorkModel(1.0, 0.002)
SPEEDS = [3.0, 1.0, 0.5]
STRATEGIES = ["stratified", "random", "packed"]


def whole(lengths, batch_size, strategy, seed=5):
    if strategy == "packed":
        return PackedSampler(lengths, 1, 0, batch_size, seed, work=WORK)
    return BalancedSampler(lengths, 1, 0, batch_size, seed, strategy, work=WORK)


def samplers(lengths, speeds, batch_size=24, strategy="stratified"):
    return [
        SpeedSampler(whole(lengths, batch_size, strategy), rank, speeds, work=WORK)
        for rank in range(len(speeds))
    ]


def work_of(lengths, indices):
    sizes = lengths[indices].astype(float)
    return (WORK.linear * sizes + WORK.quadratic * sizes**2).sum()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_global_batches_do_not_depend_on_speeds(strategy):
    lengths = sample_lengths(500, seed=1)
    ranks = samplers(lengths, SPEEDS, strategy=strategy)
    steps = list(zip(*ranks, strict=True))
    expected = list(whole(lengths, 24, strategy))
    assert len(steps) == len(expected)
    for step, together in zip(steps, expected, strict=True):
        np.testing.assert_array_equal(np.sort(np.concatenate(step)), np.sort(together))
        for indices in step:
            assert (np.diff(lengths[indices].astype(int)) <= 0).all(), "longest first"
    assert all(sampler.epoch == 1 for sampler in ranks)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_work_is_in_proportion_to_speed(strategy):
    lengths = sample_lengths(3000, seed=2)
    ranks = samplers(lengths, SPEEDS, 96, strategy)
    for step in list(zip(*ranks, strict=True))[:-1]:
        times = np.array([work_of(lengths, i) for i in step]) / SPEEDS
        longest = WORK(float(lengths[np.concatenate(step)].max()))
        # List scheduling: when the last example of a rank was given, no other was done earlier.
        assert times.max() - times.min() <= longest / min(SPEEDS)


def test_efficiency_is_that_of_the_last_step():
    lengths = sample_lengths(300, seed=4)
    ranks = samplers(lengths, SPEEDS)
    assert ranks[0].straggler_efficiency() == 1
    for step in zip(*ranks, strict=True):
        times = np.array([work_of(lengths, i) for i in step]) / SPEEDS
        for sampler in ranks:
            assert sampler.straggler_efficiency() == pytest.approx(times.mean() / times.max())


def test_new_speeds_begin_where_they_are_told_to():
    lengths = np.full(400, 100)
    ranks = samplers(lengths, [1.0, 1.0], 20)
    steps = []
    for number, step in enumerate(zip(*ranks, strict=True)):
        if number == 3:
            for sampler in ranks:
                sampler.set_speeds([9.0, 1.0], 6)
                sampler.set_speeds([1.0, 4.0], 8)
        steps.append([len(indices) for indices in step])
    assert steps[:6] == [[10, 10]] * 6
    assert steps[6:8] == [[18, 2]] * 2
    assert steps[8:] == [[4, 16]] * 12


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_resumed_with_other_speeds_and_ranks(strategy):
    lengths = sample_lengths(500, seed=3)
    expected = list(whole(lengths, 24, strategy))
    sampler = samplers(lengths, SPEEDS, strategy=strategy)[1]
    for _ in zip(range(5), sampler, strict=False):
        pass
    state = json.loads(json.dumps(sampler.state_dict()))
    ranks = samplers(lengths, [1.0, 2.0], strategy=strategy)
    for other in ranks:
        other.load_state_dict(state)
        assert other.steps_left == len(expected) - 5
        assert other.rows_in_step is None or strategy == "packed"
    for step, together in zip(zip(*ranks, strict=True), expected[5:], strict=True):
        np.testing.assert_array_equal(np.sort(np.concatenate(step)), np.sort(together))


def test_a_rank_may_get_nothing():
    ranks = samplers(np.array([10, 10, 10]), [1.0, 1e-6], 2)
    assert [[len(i) for i in step] for step in zip(*ranks, strict=True)] == [[2, 0], [1, 0]]


@pytest.mark.parametrize(
    ("rank", "speeds", "message"),
    [
        (2, [1, 1], "rank: expected 0 to 1, got 2"),
        (0, [], "speeds: "),
        (0, [[1.0]], "speeds: "),
        (0, [1.0, 0.0], "speeds: "),
        (0, [1.0, np.inf], "speeds: "),
    ],
)
def test_bad_arguments_are_named(rank, speeds, message):
    with pytest.raises(ValueError, match=message):
        SpeedSampler(whole(np.arange(5), 2, "random"), rank, speeds)


def test_speeds_cannot_change_what_was_dealt_out():
    sampler = samplers(np.arange(40), [1.0, 1.0], 4)[0]
    for _ in zip(range(3), sampler, strict=False):
        pass
    with pytest.raises(ValueError, match="at: expected 3 or more, got 2"):
        sampler.set_speeds([1.0, 2.0], 2)
    with pytest.raises(ValueError, match="speeds: expected 2 numbers"):
        sampler.set_speeds([1.0], 9)
