"""BalancedSampler: positions, saving, resuming on any number of ranks without loss or repeats."""

import json
import random
from collections import Counter
from itertools import chain

import numpy as np
import pytest

from bert_unpad.data.sampling.balanced_sampler import BalancedSampler, WorkModel
from bert_unpad.data.sampling.epoch_sampler import as_lengths
from bert_unpad.data.sampling.histogram import (
    all_lengths,
    read_histogram,
    sample_lengths,
    wikipedia_lengths,
)
from tests.support.seeds import derived

STRATEGIES = ("stratified", "random")


def make_ranks(lengths, num_replicas, batch_size, strategy="stratified", **options):
    options = {"seed": 3, "pool_steps": 4} | options
    return [
        BalancedSampler(lengths, num_replicas, rank, batch_size, strategy=strategy, **options)
        for rank in range(num_replicas)
    ]


def take(samplers, steps):
    """The next steps of all ranks: [step][rank] -> list of indices; ranks must stay together."""
    iterators = [iter(sampler) for sampler in samplers]
    return [[next(iterator).tolist() for iterator in iterators] for _ in range(steps)]


def through_json(sampler, **arguments):
    return json.loads(json.dumps(sampler.state_dict(**arguments)))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_epoch_covers_every_example_once(strategy):
    lengths = sample_lengths(203, seed=1)
    samplers = make_ranks(lengths, 4, 6, strategy)
    epochs = []
    for epoch in range(2):
        assert {sampler.epoch for sampler in samplers} == {epoch}
        batches = [list(sampler) for sampler in samplers]
        assert {len(steps) for steps in batches} == {samplers[0].steps_per_epoch} == {9}
        assert all(indices.dtype == np.int64 for steps in batches for indices in steps)
        seen = [int(i) for steps in batches for indices in steps for i in indices]
        assert sorted(seen) == list(range(203))
        epochs.append(seen)
    assert epochs[0] != epochs[1]


def test_position_moves_with_iteration():
    sampler = make_ranks(sample_lengths(100, seed=2), 2, 5)[0]
    assert (sampler.step, sampler.steps_left, sampler.steps_per_epoch) == (0, 10, 10)
    whole = [indices.tolist() for indices in make_ranks(sampler.lengths, 2, 5)[0]]
    first = take([sampler], 3)
    assert (sampler.step, sampler.steps_left, sampler.epoch) == (3, 7, 0)
    rest = [indices.tolist() for indices in sampler]
    assert [step[0] for step in first] + rest == whole
    assert (sampler.step, sampler.steps_left, sampler.epoch) == (0, 10, 1)
    # After the last batch the epoch is still the old one: a consumer may ask which one it is in.
    take([sampler], 10)
    assert (sampler.step, sampler.steps_left, sampler.epoch) == (10, 0, 1)
    take([sampler], 1)
    assert (sampler.step, sampler.steps_left, sampler.epoch) == (1, 9, 2)
    sampler.set_epoch(0)
    assert [indices.tolist() for indices in sampler] == whole


def test_an_old_iterator_does_not_go_on_silently():
    sampler = make_ranks(sample_lengths(100, seed=2), 2, 5)[0]
    for disturb in (
        lambda: iter(sampler),
        lambda: sampler.set_epoch(4),
        lambda: sampler.load_state_dict(sampler.state_dict()),
    ):
        iterator = iter(sampler)
        next(iterator)
        disturb()
        with pytest.raises(RuntimeError, match="moved, or iterated again"):
            next(iterator)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_resume_on_the_same_ranks_continues_the_same_plan(strategy):
    rng = random.Random(derived(3))
    for _ in range(40):
        replicas, batch = rng.randint(1, 5), rng.randint(1, 5)
        lengths = sample_lengths(rng.randint(1, 20 * replicas * batch), seed=rng.randint(0, 99))
        whole = make_ranks(lengths, replicas, batch, strategy)
        steps = whole[0].steps_per_epoch
        done = rng.randint(0, steps)
        expected = take(whole, steps)
        take(whole, min(steps, 3))  # and some of the next epoch
        before = make_ranks(lengths, replicas, batch, strategy)
        take(before, done)
        state = through_json(before[rng.randrange(replicas)])
        # The seed comes from the state.
        after = make_ranks(lengths, replicas, batch, strategy, seed=77)
        for sampler in after:
            sampler.load_state_dict(state)
        if done == steps:
            assert (after[0].epoch, after[0].step) == (1, 0)
        else:
            assert after[0].step == done
            assert take(after, steps - done) == expected[done:]
        # What a run that goes on is asked for by number is the same state.
        before[0].set_epoch(0)
        assert through_json(before[0], steps_done=done) == state


@pytest.mark.parametrize("strategy", [*STRATEGIES, "mixed"])
def test_nothing_lost_or_repeated_when_the_number_of_ranks_changes(strategy):
    rng = random.Random(derived(4))
    changes = Counter()
    for _ in range(60):
        lengths = sample_lengths(rng.randint(1, 400), seed=rng.randint(0, 99))
        state, seen, steps_seen = None, [], 0
        while True:
            kind = rng.choice(STRATEGIES) if strategy == "mixed" else strategy
            replicas, batch = rng.choice([1, 2, 3, 8]), rng.choice([1, 2, 5, 12])
            samplers = make_ranks(lengths, replicas, batch, kind)
            if state is not None:
                for sampler in samplers:
                    sampler.load_state_dict(state)
            if samplers[0].epoch == 1:
                break
            assert {sampler.step for sampler in samplers} == {steps_seen}
            left = samplers[0].steps_left
            assert left == -(-(len(lengths) - len(seen)) // (replicas * batch))
            steps = rng.choice([0, 1, 2, left // 2, left])
            for step in take(samplers, min(steps, left)):
                seen += [i for indices in step for i in indices]
                steps_seen += 1
            state = through_json(samplers[-1])
            changes[len(state["history"])] += 1
        assert sorted(seen) == list(range(len(lengths)))
    assert max(changes) >= 3, "the test should see several changes within an epoch"


def test_changing_ranks_without_a_step_leaves_no_trace():
    lengths = sample_lengths(300, seed=5)
    first = make_ranks(lengths, 4, 5)
    take(first, 4)
    state = first[0].state_dict()
    other = make_ranks(lengths, 3, 7)[0]
    other.load_state_dict(state)
    again = make_ranks(lengths, 4, 5)
    for sampler in again:
        sampler.load_state_dict(other.state_dict())
    assert take(again, 3) == take(first, 3)


def test_random_goes_on_with_the_same_global_batches():
    lengths = sample_lengths(500, seed=6)
    whole = make_ranks(lengths, 4, 6, "random")
    expected = [sorted(chain(*step)) for step in take(whole, 10)]
    before = make_ranks(lengths, 4, 6, "random")
    take(before, 4)
    after = make_ranks(lengths, 12, 2, "random")
    for sampler in after:
        sampler.load_state_dict(before[0].state_dict())
    assert [sorted(chain(*step)) for step in take(after, 6)] == expected[4:]
    assert after[0].state_dict()["history"][0]["steps"] == 10


def test_straggler_efficiency_is_that_of_the_batches():
    lengths = sample_lengths(700, seed=7)
    work = WorkModel(1, 0.01)
    for strategy in STRATEGIES:
        samplers = make_ranks(lengths, 4, 8, strategy, work=work)
        steps = take(samplers, samplers[0].steps_per_epoch)
        for sampler in samplers:
            sampler.set_epoch(0)
        iterator = iter(samplers[1])
        for number, step in enumerate(steps):
            of_ranks = [sum(work(int(lengths[i])) for i in indices) for indices in step]
            expected = np.mean(of_ranks) / max(of_ranks)
            assert samplers[0].straggler_efficiency(number) == pytest.approx(expected, rel=1e-6)
            next(iterator)
            assert samplers[1].straggler_efficiency() == pytest.approx(expected, rel=1e-6)


def test_few_long_sequences_a_rank_make_updates_vary():
    lengths = np.exp(np.random.default_rng(derived(3)).uniform(3, 9, 4000)).astype(np.uint16)
    work, found = WorkModel(1, 1e-4), []
    for batch in (1, 16):
        samplers = make_ranks(lengths, 8, batch, work=work)
        steps = take(samplers, len(lengths) // (8 * batch))
        of_steps = [sum(work(int(lengths[i])) for i in chain(*step)) for step in steps]
        found.append(samplers[0].work_variation())
        assert found[-1] == pytest.approx(np.std(of_steps) / np.mean(of_steps), rel=1e-6)
    # Of single sequences it is about 1.6.
    assert found[0] > 1 > 0.5 > found[1]


def test_straggler_efficiency_after_a_change_of_ranks():
    lengths = sample_lengths(700, seed=8)
    before = make_ranks(lengths, 4, 8)
    take(before, 5)
    after = make_ranks(lengths, 2, 8)
    for sampler in after:
        sampler.load_state_dict(before[0].state_dict())
    with pytest.raises(ValueError, match="step: expected 5"):
        after[0].straggler_efficiency(4)
    work = WorkModel.for_hidden()
    [step] = take(after, 1)
    of_ranks = [sum(work(int(lengths[i])) for i in indices) for indices in step]
    assert after[0].straggler_efficiency(5) == pytest.approx(
        np.mean(of_ranks) / max(of_ranks), rel=1e-6
    )


def test_stratified_beats_random():
    lengths = sample_lengths(20_000, seed=9)
    means = {}
    for strategy in STRATEGIES:
        sampler = BalancedSampler(lengths, 16, 0, 16, strategy=strategy)
        means[strategy] = np.mean(
            [sampler.straggler_efficiency(step) for step in range(sampler.steps_per_epoch)]
        )
    assert means["stratified"] > 0.99
    assert means["random"] < 0.9


def test_fewer_examples_than_ranks():
    samplers = make_ranks([7, 9], 5, 3)
    [step] = take(samplers, 1)
    assert sorted(map(len, step)) == [0, 0, 0, 1, 1]
    assert samplers[0].steps_left == 0
    assert samplers[0].straggler_efficiency() == pytest.approx((7 + 9) / 5 / 9, rel=1e-2)


def test_examples_without_tokens_are_examples():
    samplers = make_ranks(np.zeros(10, np.int64), 2, 2)
    seen = [i for step in take(samplers, 3) for indices in step for i in indices]
    assert sorted(seen) == list(range(10))
    assert samplers[0].straggler_efficiency() == 1.0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"lengths": []}, ValueError, "lengths: expected at least one"),
        ({"lengths": [1.5, 2.0]}, TypeError, "lengths: expected integers"),
        ({"lengths": [[1, 2]]}, ValueError, "lengths: expected one dimension"),
        ({"lengths": [3, -1]}, ValueError, "lengths: expected 0 to 65535"),
        ({"lengths": [3, 65_536]}, ValueError, "lengths: expected 0 to 65535"),
        ({"num_replicas": 0}, ValueError, "num_replicas: expected 1"),
        ({"rank": 2}, ValueError, "rank: expected 0 to 1"),
        ({"rank": -1}, ValueError, "rank: expected 0 to 1"),
        ({"batch_size": 0}, ValueError, "batch_size: expected 1"),
        ({"seed": -1}, ValueError, "seed: expected 0"),
        ({"strategy": "sorted"}, ValueError, "strategy: expected 'stratified'"),
        ({"pool_steps": 0}, ValueError, "pool_steps: expected 1"),
    ],
)
def test_bad_arguments_are_named(change, error, message):
    good = {"lengths": [5, 6], "num_replicas": 2, "rank": 0, "batch_size": 1, "seed": 0}
    with pytest.raises(error, match=f"^{message}"):
        BalancedSampler(**(good | change))


def test_lengths_are_not_copied_where_they_fit():
    lengths = sample_lengths(10, seed=10)
    assert as_lengths(lengths) is lengths
    assert as_lengths([1, 2]).dtype == np.uint16


def test_bad_states_are_refused():
    lengths = sample_lengths(100, seed=11)
    sampler = make_ranks(lengths, 2, 5)[0]
    take([sampler], 3)
    good = through_json(sampler)

    def refused(message, **change):
        with pytest.raises(ValueError, match=message):
            sampler.load_state_dict(good | change)
        # A refused state leaves the sampler where it was.
        assert (sampler.epoch, sampler.step) == (0, 3)

    refused("version 1, got 2", version=2)
    refused("other data", num_examples=99)
    refused("not a state", history=[{}])
    refused("not a state", epoch=None)
    refused("not a state", epoch=float("inf"))
    refused("out of range", epoch=2**64)
    refused("out of range", epoch=-1)
    part = good["history"][0]
    refused("not a state", history=[part | {"steps": 0}])
    refused("not a state", history=[part | {"pool_steps": 2**70}])
    refused("not a state", history=[part | {"strategy": "sorted"}])
    refused("more steps than the epoch", history=[part | {"steps": 11}])
    refused("after the end", history=[part | {"steps": 10}, part])
    with pytest.raises(ValueError, match="other data"):
        make_ranks(lengths[::-1].copy(), 2, 5)[0].load_state_dict(good)
    for steps_done in (-1, 11):
        with pytest.raises(ValueError, match="steps_done"):
            sampler.state_dict(steps_done)


def test_wikipedia_histogram_is_the_published_one():
    counts = wikipedia_lengths()
    assert counts.shape == (513,)
    assert counts.dtype == np.int64
    assert counts.sum() == 16_279_552
    assert (counts * np.arange(513)).sum() / counts.sum() == pytest.approx(255.83, abs=0.005)
    assert counts[512] / counts.sum() == pytest.approx(0.234, abs=0.0005)
    shares = [counts[low + 1 : low + 129].sum() / counts.sum() for low in (0, 128, 256, 384)]
    assert shares == pytest.approx([0.369, 0.197, 0.117, 0.316], abs=0.0006)


def test_sample_lengths_follow_the_histogram():
    lengths = sample_lengths(200_000, seed=12)
    assert lengths.dtype == np.uint16
    counts = wikipedia_lengths()
    expected = np.cumsum(counts) / counts.sum()
    found = np.cumsum(np.bincount(lengths, minlength=513)) / len(lengths)
    assert np.abs(found - expected).max() < 1.95 / np.sqrt(len(lengths))  # p = 0.001
    np.testing.assert_array_equal(lengths, sample_lengths(200_000, seed=12))
    assert (sample_lengths(1000, seed=13) != sample_lengths(1000, seed=14)).any()
    assert set(sample_lengths(100, 0, np.array([0, 0, 3, 0, 1])).tolist()) == {2, 4}
    for bad in ({"n": -1}, {"n": 1, "seed": -1}):
        with pytest.raises(ValueError, match="expected 0 or more"):
            sample_lengths(**bad)


def test_histogram_files(tmp_path):
    path = tmp_path / "counts.txt"
    path.write_text("0\n3\n1\n\n", "utf-8-sig")
    np.testing.assert_array_equal(read_histogram(path), [0, 0, 3, 1])
    np.testing.assert_array_equal(all_lengths(read_histogram(path)), [2, 2, 2, 3])
    for text, message in (
        ("1\nx\n", "line 2: expected a number"),
        ("1\n-1\n", "line 2: expected a number"),
        ("", "at least one sequence"),
        ("0\n0\n", "at least one sequence"),
        ("1\n" * 65_536, "at most 65535"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_histogram(path)
