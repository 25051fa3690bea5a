"""`gather` and `pack` of the compiled module, against loops over examples."""

import numpy as np
import pytest

from bert_unpad._text import Masker, gather, pack
from tests.support.seeds import derived

KINDS = bytes([0, 0, *[1 + 4] * 8])  # ids 0 and 1 are special


def examples(rng, size, count):
    """Where examples begin in a buffer, how long they are, and where second segments begin."""
    lengths = rng.integers(0, 20, count)
    begins = rng.integers(0, size - lengths + 1)
    return begins, lengths, rng.integers(0, lengths + 1)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int64, np.float32, "S3"])
def test_gather_equals_a_loop(dtype):
    rng = np.random.default_rng(derived(0))
    sources = [rng.integers(0, 100, size).astype(dtype) for size in (50, 20, 1000)]
    sources[1].setflags(write=False)  # as memory-mapped ones are
    source = rng.integers(0, 3, 40)
    sizes = np.array([len(part) for part in sources])[source]
    lengths = rng.integers(0, 20, 40)
    begins = rng.integers(0, sizes - lengths + 1)
    found = gather(sources, source, begins, lengths)
    parts = [
        sources[s][begin : begin + length]
        for s, begin, length in zip(source, begins, lengths, strict=True)
    ]
    np.testing.assert_array_equal(found, np.concatenate(parts))
    assert found.dtype == np.dtype(dtype)


def test_gather_of_nothing():
    none = np.empty(0, np.int64)
    for source in (np.empty(0, np.uint16), np.arange(5, dtype=np.uint16)):
        assert gather([source], none, none, none).dtype == np.uint16
        zero = np.zeros(3, np.int64)
        assert len(gather([source], zero, zero, zero)) == 0
    at_end = gather([source], np.array([0]), np.array([5]), np.array([0]))
    assert len(at_end) == 0


BIG = 2**62


@pytest.mark.parametrize(
    ("source", "begin", "length", "message"),
    [
        (0, 3, 3, "expected parts of 0 to 5, got 3 from 3"),
        (0, -1, 2, "expected parts of 0 to 5"),
        (0, 1, -1, "expected parts of 0 to 5"),
        (0, BIG, BIG, "expected parts of 0 to 5"),
        (0, 0, 2**63 - 1, "expected parts of 0 to 5"),
        (0, -(2**63), 2**63 - 1, "expected parts of 0 to 5"),
        (1, 0, 1, "source: expected 0 to 0, got 1"),
        (-1, 0, 1, "source: expected 0 to 0, got -1"),
    ],
)
def test_gather_refuses_what_lies_outside(source, begin, length, message):
    columns = [np.array([0, value]) for value in (source, begin, length)]
    with pytest.raises(ValueError, match=message):
        gather([np.arange(5)], *columns)


def test_gather_refuses_other_arrays():
    one, none = np.zeros(1, np.int64), np.empty(0, np.int64)
    with pytest.raises(ValueError, match="sources: expected at least one"):
        gather([], none, none, none)
    for sources in (
        [np.zeros((2, 2))],
        [np.arange(10)[::2]],
        [np.zeros(2), np.zeros(2, np.int8)],
        [np.array([object()])],
    ):
        with pytest.raises(TypeError, match="sources: expected contiguous"):
            gather(sources, one, one, one)
    with pytest.raises(TypeError, match=r"begins: expected a contiguous .* int64"):
        gather([np.arange(5)], one, one.astype(np.int32), one)
    with pytest.raises(ValueError, match="source, begins, lengths: expected equal sizes"):
        gather([np.arange(5)], one, none, one)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int32, np.int64])
def test_pack_equals_a_loop(dtype):
    rng = np.random.default_rng(derived(1))
    tokens = rng.integers(0, 60_000, 300).astype(dtype)
    begins, lengths, second = examples(rng, 300, 50)
    ids, types, positions, labels = pack(tokens, begins, lengths, second)
    rows = [tokens[b : b + n].tolist() for b, n in zip(begins, lengths, strict=True)]
    assert ids.tolist() == [token for row in rows for token in row]
    assert types.tolist() == [
        int(place >= s) for n, s in zip(lengths, second, strict=True) for place in range(n)
    ]
    assert [array.dtype for array in (ids, types, positions, labels)] == [np.int64] * 4
    assert len(positions) == len(labels) == 0


def test_masks_depend_on_the_coordinates_alone():
    rng = np.random.default_rng(derived(2))
    tokens = rng.integers(0, 10, 300).astype(np.uint16)
    begins, lengths, second = examples(rng, 300, 50)
    coordinates = rng.integers(0, 2**62, 50)
    masker = Masker(KINDS, unit="token", mask_id=1, max_predictions=None, always_mask=False, seed=3)

    def packed(which):
        ids, _, positions, labels = pack(
            *(tokens, begins[which], lengths[which], second[which]),
            masker=masker,
            examples=coordinates[which],
            epoch=7,
            rate=0.3,
        )
        ends = np.cumsum(lengths[which])
        owner = np.searchsorted(ends, positions, side="right")
        for number, end in enumerate(ends):
            mine = owner == number
            row = ids[end - lengths[which][number] : end]
            places = positions[mine] - (end - lengths[which][number])
            yield which[number], (row.tolist(), places.tolist(), labels[mine].tolist())

    whole = dict(packed(np.arange(50)))
    for parts in (np.split(rng.permutation(50), [7, 8, 30]), [np.arange(50)[::-1]]):
        assert dict(each for part in parts for each in packed(part)) == whole
    assert any(places for _, places, _ in whole.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"begins": [0, 9]}, "begins, lengths: expected parts of 0 to 10, got 4 from 9"),
        ({"begins": [0, -3]}, "expected parts of 0 to 10"),
        ({"lengths": [3, 2**62]}, "expected parts of 0 to 10"),
        ({"lengths": [3, -1]}, "expected parts of 0 to 10"),
        ({"second_starts": [0, 5]}, r"second_starts: expected 0 to 4 \(the length\), got 5"),
        ({"second_starts": [0, -1]}, "second_starts: expected"),
        ({"lengths": [3]}, "begins, lengths, second_starts, examples: expected equal sizes"),
        ({"examples": [1]}, "begins, lengths, second_starts, examples: expected equal sizes"),
        ({"examples": None}, "masker and examples: expected both or none, got one"),
    ],
)
def test_pack_refuses_what_does_not_fit(change, message):
    masker = Masker(KINDS, unit="word", mask_id=1, max_predictions=2, always_mask=True, seed=0)
    columns = {"begins": [0, 5], "lengths": [3, 4], "second_starts": [1, 4], "examples": [0, 1]}
    given = {
        name: None if values is None else np.array(values)
        for name, values in (columns | change).items()
    }
    with pytest.raises(ValueError, match=message):
        pack(np.arange(10), **given, masker=masker, rate=0.5)


def test_pack_refuses_other_tokens():
    none = np.empty(0, np.int64)
    for tokens in (
        np.zeros(3),
        np.zeros(3, np.int8),
        np.zeros((2, 2), np.int64),
        np.arange(6)[::2],
    ):
        with pytest.raises(TypeError, match="tokens: expected a contiguous"):
            pack(tokens, none, none, none)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unit": "sentence"}, "unit: expected 'token', 'word' or 'span', got 'sentence'"),
        ({"mask_id": 10}, "expected ids of 0 to 9, got 10"),
        ({"mask_id": -1}, "expected ids of 0 to 9, got -1"),
        ({"max_predictions": 0}, "max_predictions: expected 1 or more, got 0"),
        ({"kinds": bytes([1] * 10)}, "kinds: expected ids that may replace"),
        ({"kinds": b""}, "kinds: expected ids that may replace"),
    ],
)
def test_a_masker_needs_possible_settings(change, message):
    settings = {"kinds": KINDS, "unit": "token", "mask_id": 1, "max_predictions": None}
    with pytest.raises(ValueError, match=message):
        Masker(**settings | {"always_mask": False, "seed": 0} | change)
