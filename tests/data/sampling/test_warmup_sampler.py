"""Batches that grow: their sizes, each example once, and going on from any update on any ranks."""

import json
from itertools import chain

import numpy as np
import pytest

from bert_unpad.data import BalancedSampler, PackedSampler, SpeedSampler
from bert_unpad.data.sampling.balanced_sampler import WorkModel
from bert_unpad.data.sampling.histogram import sample_lengths
from bert_unpad.data.sampling.warmup_sampler import BatchWarmup, WarmupSampler

WORK = WorkModel(1.0, 0.002)
LENGTHS = sample_lengths(400, seed=3)
WARMUP = BatchWarmup(full=4, steps=9)
FIRST = 6  # sequences, or rows, of the first batch
STRATEGIES = ["stratified", "random", "packed"]


def parts(ranks: int, rank: int, strategy: str):
    if strategy == "packed":
        return PackedSampler(LENGTHS, ranks, rank, FIRST // ranks, 5, work=WORK)
    return BalancedSampler(
        LENGTHS, ranks, rank, FIRST // ranks, 5, strategy, work=WORK, pool_steps=3
    )


def samplers(ranks: int, strategy: str, updates: int = 0) -> list[WarmupSampler]:
    return [WarmupSampler(parts(ranks, r, strategy), WARMUP, updates) for r in range(ranks)]


def take(ranks: list, steps: int) -> list[list[list[int]]]:
    """The next steps of all ranks, over the ends of epochs."""
    found = []
    while len(found) < steps:
        for step in zip(*ranks, strict=False):
            found.append([indices.tolist() for indices in step])
            if len(found) == steps:
                break
    return found


def test_parts_grow_from_one_to_all():
    assert [BatchWarmup(4, 6).parts(u) for u in range(9)] == [1, 1, 2, 2, 3, 3, 4, 4, 4]
    assert [BatchWarmup(5, 1).parts(u) for u in range(3)] == [1, 5, 5]
    assert [BatchWarmup(1, 7).parts(u) for u in (0, 6, 10**12)] == [1, 1, 1]
    for name in ("full", "steps"):
        with pytest.raises(ValueError, match=f"^{name}: expected 1 or more, got 0"):
            BatchWarmup(**{"full": 2, "steps": 2, name: 0})


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_example_once_an_epoch_in_batches_that_grow(strategy, ranks):
    every = samplers(ranks, strategy)
    update = 0
    for epoch in range(3):
        assert {sampler.epoch for sampler in every} == {epoch}
        used, sizes = [], []
        for step in zip(*every, strict=True):
            joined = np.concatenate(step)
            used += joined.tolist()
            sizes.append(every[0].rows_in_step or len(joined))
            for indices in step:
                assert (np.diff(LENGTHS[indices].astype(int)) <= 0).all(), "longest first"
        assert sorted(used) == list(range(len(LENGTHS)))
        wanted = [FIRST * WARMUP.parts(update + i) for i in range(len(sizes))]
        assert sizes[:-1] == wanted[:-1]
        assert 0 < sizes[-1] <= wanted[-1]
        update += len(sizes)
    assert WARMUP.parts(update) == 4


def test_random_batches_are_the_same_on_any_number_of_ranks():
    steps = [take(samplers(ranks, "random"), 12) for ranks in (1, 2, 3)]
    for alone, two, three in zip(*steps, strict=True):
        assert sorted(alone[0]) == sorted(chain(*two)) == sorted(chain(*three))


@pytest.mark.parametrize("cut", [1, 5, 8, 20])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_goes_on_with_the_same_batches(strategy, cut):
    expected = take(samplers(2, strategy), 40)
    before = samplers(2, strategy)
    assert take(before, cut) == expected[:cut]
    state = json.loads(json.dumps(before[0].state_dict()))
    after = samplers(2, strategy, updates=cut)
    for sampler in after:
        sampler.load_state_dict(state)
    assert take(after, 40 - cut) == expected[cut:]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_goes_on_on_other_ranks_with_what_is_left(strategy):
    before = samplers(2, strategy)
    used = [index for step in take(before, 5) for index in chain(*step)]
    state = before[0].state_dict()
    after = samplers(3, strategy, updates=5)
    for sampler in after:
        sampler.load_state_dict(state)
    sizes = []
    for step in zip(*after, strict=True):
        joined = np.concatenate(step).tolist()
        sizes.append(after[0].rows_in_step or len(joined))
        used += joined
    assert sorted(used) == list(range(len(LENGTHS)))
    assert sizes[:-1] == [FIRST * WARMUP.parts(5 + i) for i in range(len(sizes) - 1)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_straggler_efficiency_is_that_of_the_whole_update(strategy):
    every = samplers(3, strategy)
    assert every[0].straggler_efficiency() == 1
    for step in zip(*every, strict=True):
        sizes = [LENGTHS[indices].astype(float) for indices in step]
        work = np.array([(WORK.linear * x + WORK.quadratic * x**2).sum() for x in sizes])
        expected = pytest.approx(work.mean() / work.max())
        assert every[0].straggler_efficiency() == every[2].straggler_efficiency() == expected


def test_ranks_of_unequal_speed_share_batches_that_grow():
    def whole() -> WarmupSampler:
        return WarmupSampler(parts(1, 0, "stratified"), WARMUP)

    ranks = [SpeedSampler(whole(), rank, [2.0, 1.0], work=WORK) for rank in range(2)]
    for step, together in zip(take(ranks, 30), take([whole()], 30), strict=True):
        assert sorted(chain(*step)) == sorted(together[0])
        assert len(step[0]) >= len(step[1])
