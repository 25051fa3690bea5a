"""Splits a batch's sequences into a few groups of similar length, one attention launch each.

A launch has a grid and a tile shape for its longest sequence, so short sequences in a group of
their own do not run at the size of the longest one.
"""

from typing import NamedTuple

import numpy as np

# Attention computes scores in tiles of this many rows and columns, so lengths cost by the tile.
TILE = 64


class LengthGroup(NamedTuple):
    """Sequences of similar length, which attention can process with one launch configuration."""

    max_seqlen: int
    """The longest length in the group."""
    sequences: tuple[int, ...]
    """Indices of the sequences within the batch."""


def length_groups(lengths: np.ndarray, max_groups: int) -> tuple[LengthGroup, ...]:
    """The groups that make the sum of count * (tiles of the longest)**2 least.

    Args:
        lengths: non-negative integers [B].
        max_groups: at most this many groups, 1 or more. Of equally good divisions the one with the
            fewest groups is taken.

    Returns:
        Groups that hold each sequence once, longest first, also within a group; equal lengths keep
        their order. No groups for no sequences.
    """
    if lengths.size == 0:
        return ()
    order = np.argsort(-lengths.astype(np.int64), kind="stable")
    ordered = lengths[order]
    tiles = np.maximum(-(-ordered.astype(np.int64) // TILE), 1)
    # Groups are only cut where the number of tiles changes; a bin is what lies between two cuts.
    begins = np.concatenate(([0], np.flatnonzero(np.diff(tiles)) + 1, [lengths.size]))
    cuts = [int(begins[bin]) for bin in _best_cuts(begins, tiles[begins[:-1]], max_groups)]
    return tuple(
        LengthGroup(int(ordered[begin]), tuple(order[begin:end].tolist()))
        for begin, end in zip(cuts, [*cuts[1:], lengths.size], strict=True)
    )


def _best_cuts(begins: np.ndarray, tiles: np.ndarray, max_groups: int) -> list[int]:
    """The bins at which the cheapest division begins its groups, by dynamic programming."""
    bins = tiles.size
    # group[i, k]: cost of one group of the bins i to k - 1. In float64, which is exact up to 2**53
    # and cannot overflow.
    group = np.full((bins, bins + 1), np.inf)
    counts = (begins[None, :] - begins[:-1, None]).astype(np.float64)
    np.copyto(group, counts * tiles[:, None].astype(np.float64) ** 2, where=counts > 0)
    # cost[k]: of the first k bins, in one more group each round; first[k]: where the last begins.
    cost = np.concatenate(([0.0], np.full(bins, np.inf)))
    totals, firsts = [], []
    for _ in range(min(max_groups, bins)):
        candidates = cost[:-1, None] + group
        first = candidates.argmin(0)
        cost = candidates[first, np.arange(bins + 1)]
        totals.append(cost[bins])
        firsts.append(first)
    cuts, end = [], bins
    for first in firsts[int(np.argmin(totals)) :: -1]:
        end = int(first[end])
        cuts.append(end)
    return cuts[::-1]
