"""Which held-out examples are evaluated, where there are more than asked for."""

import numpy as np
import pytest

from bert_unpad.pretrain.evaluate import choose_by_length
from tests.support.seeds import derived


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(derived(3))


def test_lengths_are_those_of_training(rng: np.random.Generator) -> None:
    train, held_out = rng.integers(2, 129, 9000), rng.integers(2, 129, 2000) // 2 + 64
    held_out[:700] = rng.integers(2, 129, 700)
    for most in (1, 100, 300):
        chosen = choose_by_length(held_out, train, most)
        assert len(np.unique(chosen)) == most
        found = held_out[chosen]
        assert (np.diff(found) >= 0).all()
        wanted = np.quantile(train, (np.arange(most) + 0.5) / most)
        assert np.abs(found - wanted).max() <= 12  # two of a length may be asked for, and one there


def test_few_are_all_taken(rng: np.random.Generator) -> None:
    held_out = rng.integers(2, 129, 50)
    for train, most in ((rng.integers(2, 9, 90), 50), (rng.integers(2, 9, 90), 51), (held_out, 49)):
        chosen = choose_by_length(held_out, train, most)
        assert len(np.unique(chosen)) == min(most, 50)
        assert (np.diff(held_out[chosen]) >= 0).all()
    assert len(choose_by_length(held_out, held_out[:0], 7)) == 7
    assert len(choose_by_length(held_out[:0], held_out, 7)) == 0


def test_longer_or_shorter_than_all_takes_the_nearest() -> None:
    held_out = np.array([5, 9, 3, 7, 1])
    assert held_out[choose_by_length(held_out, np.array([100, 200]), 2)].tolist() == [7, 9]
    assert held_out[choose_by_length(held_out, np.array([0, 0]), 2)].tolist() == [1, 3]


def test_equal_lengths_are_taken_from_everywhere() -> None:
    chosen = choose_by_length(np.full(100, 64), np.full(1000, 64), 4)
    assert chosen.tolist() == [0, 25, 50, 75]
