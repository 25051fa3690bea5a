"""Packing sequences into rows of a fixed number of tokens."""

import random

import numpy as np
import pytest

from bert_unpad import _balancer
from bert_unpad.data.sampling.histogram import sample_lengths
from tests.support.seeds import derived

METHODS = ["best_fit", "shortest_first"]


def rows_of(lengths, row_tokens, **options):
    """Checks what every packing must keep, and returns the rows."""
    indices, ends = _balancer.pack(np.asarray(lengths, np.uint16), row_tokens, **options)
    assert (indices.dtype, ends.dtype) == (np.uint32, np.int64)
    np.testing.assert_array_equal(np.sort(indices), np.arange(len(lengths)))
    rows = np.split(indices, ends[:-1]) if len(ends) else []
    for row in rows:
        held = np.asarray(lengths)[row].astype(int)
        assert len(row) > 0
        assert held.sum() <= row_tokens
        assert (np.diff(held) <= 0).all()
        assert len(row) <= (options.get("max_sequences") or row_tokens)
    return rows


@pytest.mark.parametrize("method", METHODS)
def test_every_sequence_once_and_no_row_too_full(method):
    rng = random.Random(derived(1))
    for _ in range(200):
        row_tokens = rng.choice([1, 7, 64, 512])
        lengths = [rng.randint(1, row_tokens) for _ in range(rng.randint(0, 300))]
        limit = rng.choice([None, 1, 2, 3])
        rows = rows_of(
            lengths, row_tokens, method=method, max_sequences=limit, seed=rng.randint(0, 9)
        )
        if limit == 1:
            assert len(rows) == len(lengths)


@pytest.mark.parametrize("method", METHODS)
def test_no_two_rows_could_be_one(method):
    lengths = sample_lengths(3000, seed=2)
    sums = sorted(lengths[row].astype(int).sum() for row in rows_of(lengths, 512, method=method))
    assert sums[0] + sums[1] > 512


def test_best_fit_by_hand():
    rows = rows_of([5, 5, 5, 3, 2, 7, 8], 10)
    assert sorted(sorted((5, 5, 5, 3, 2, 7, 8)[i] for i in row) for row in rows) == [
        [2, 8], [3, 7], [5], [5, 5],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "limit", "fill"),
    [("best_fit", None, 0.998), ("shortest_first", None, 0.99), ("best_fit", 3, 0.89)],
)
def test_wikipedia_fills_the_rows(method, limit, fill):
    lengths = sample_lengths(2**18, seed=3)
    _, ends = _balancer.pack(lengths, 512, method=method, max_sequences=limit)
    assert lengths.sum() / (512 * len(ends)) > fill


def test_the_seed_draws_rows_and_their_sequences():
    lengths = sample_lengths(2000, seed=4)
    one, same, other = (_balancer.pack(lengths, 512, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one[0], same[0])
    assert (one[0] != other[0]).mean() > 0.9
    assert len(one[1]) == len(other[1])


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"lengths": np.array([0], np.uint16)}, ValueError, "lengths"),
        ({"lengths": np.array([513], np.uint16)}, ValueError, "lengths"),
        ({"lengths": np.array([5], np.int64)}, TypeError, "lengths"),
        ({"row_tokens": 0}, ValueError, "row_tokens"),
        ({"row_tokens": 2**16}, ValueError, "row_tokens"),
        ({"max_sequences": 0}, ValueError, "max_sequences"),
        ({"method": "first_fit"}, ValueError, "method"),
    ],
)
def test_bad_arguments_are_named(change, error, named):
    arguments = {"lengths": np.array([5], np.uint16), "row_tokens": 512} | change
    with pytest.raises(error, match=f"^{named}"):
        _balancer.pack(**arguments)
