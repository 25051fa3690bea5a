"""Length groups: the cheapest division of a batch into launches of attention."""

import itertools
import random

import numpy as np

from bert_unpad.batch.length_groups import length_groups
from tests.support.seeds import derived


def group_cost(lengths, groups):
    tiles = [max(-(-longest // 64), 1) for longest, _ in groups]
    return sum(len(members) * side**2 for side, (_, members) in zip(tiles, groups, strict=True))


def cheapest_cost(lengths, max_groups):
    """Tries all ways to cut the sorted lengths."""
    ordered = sorted(lengths, reverse=True)
    best = float("inf")
    for count in range(1, max_groups + 1):
        for cuts in itertools.combinations(range(1, len(ordered)), count - 1):
            begins, ends = (0, *cuts), (*cuts, len(ordered))
            tiles = [max(-(-ordered[begin] // 64), 1) for begin in begins]
            cost = sum(
                (end - begin) * side**2
                for begin, end, side in zip(begins, ends, tiles, strict=True)
            )
            best = min(best, cost)
    return best


def test_length_groups_are_the_cheapest():
    rng = random.Random(derived(14))
    for _ in range(200):
        longest = rng.choice([1, 64, 130, 512, 2000])
        lengths = [rng.randint(0, longest) for _ in range(rng.randint(1, 9))]
        max_groups = rng.randint(1, 4)
        groups = length_groups(np.array(lengths, np.int32), max_groups)
        assert 1 <= len(groups) <= max_groups
        members = [member for _, sequences in groups for member in sequences]
        assert sorted(members) == list(range(len(lengths)))
        in_order = [lengths[member] for member in members]
        assert in_order == sorted(lengths, reverse=True)
        for max_seqlen, sequences in groups:
            assert max_seqlen == max(lengths[member] for member in sequences)
        assert group_cost(lengths, groups) == cheapest_cost(lengths, max_groups)


def test_length_groups_by_hand():
    lengths = np.array([100, 512, 30, 500, 0, 130, 64], np.int32)
    assert length_groups(lengths, 4) == ((512, (1, 3)), (130, (5,)), (100, (0,)), (64, (6, 2, 4)))
    assert length_groups(lengths, 1) == ((512, (1, 3, 5, 0, 6, 2, 4)),)
    # Groups that would save nothing are not made; equal lengths keep their order.
    assert length_groups(np.array([60, 1, 60], np.int64), 4) == ((60, (0, 2, 1)),)
    assert length_groups(np.array([0, 0], np.int32), 4) == ((0, (0, 1)),)
    assert length_groups(np.zeros(0, np.int32), 4) == ()
