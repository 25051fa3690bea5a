"""Masks: against a plain loop over tokens, their statistics, and what they depend on."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from itertools import chain

import numpy as np
import pytest

from bert_unpad.data import (
    ShardDataset,
    ShardWriter,
    TokenMasker,
    WordPieceTokenizer,
    most_frequent_token_rate,
)
from bert_unpad.data.text.tokenizer import SPECIAL_TOKENS
from tests.support.seeds import derived

M64 = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15


@pytest.fixture(scope="module")
def tokenizer():
    words = [f"w{i}" for i in range(600)] + [f"##p{i}" for i in range(395)]
    return WordPieceTokenizer([*SPECIAL_TOKENS, *words])


def batch(tokenizer, lengths, seed=0):
    """Packed random pairs; lengths below 5 are sequences of ordinary tokens only."""
    rng = np.random.default_rng(derived(seed))
    parts = []
    for length in lengths:
        ids = rng.integers(5, tokenizer.vocab_size, length)
        if length >= 5:
            ids[[0, rng.integers(2, length - 2), -1]] = [
                tokenizer.cls_id,
                tokenizer.sep_id,
                tokenizer.sep_id,
            ]
        parts.append(ids)
    return np.concatenate([*parts, np.empty(0, np.int64)]).astype(np.int64), np.array(lengths)


def mix(x):
    """splitmix64 on Python integers."""
    x = (x + GAMMA) & M64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M64
    return x ^ (x >> 31)


def reference(tokenizer, ids, *, index, seed, epoch, prob, whole_word, cap):
    """(seen ids, positions) of one sequence, token by token."""
    state = mix((mix((mix(seed & M64) + epoch) & M64) + index * GAMMA) & M64)
    hashes = [mix((state + place * GAMMA) & M64) for place in range(len(ids))]
    words = []
    for place, token in enumerate(ids):
        if token in tokenizer.unmaskable_ids:
            continue
        continues = whole_word and tokenizer.is_continuation[token]
        if continues and words and words[-1][-1] == place - 1:
            words[-1].append(place)
        else:
            words.append([place])
    words.sort(key=lambda word: (hashes[word[0]] >> 40, word[0]))
    quota = max(1, round(len(ids) * prob))
    quota = min(quota, cap) if cap else quota
    chosen = []
    for word in words:
        if len(chosen) + len(word) <= quota:
            chosen += word
    if words and not chosen:
        chosen = words[0][:cap]
    chosen.sort()
    seen = list(ids)
    ordinary = [t for t in range(tokenizer.vocab_size) if t not in range(5)]
    for place in chosen:
        second = mix(hashes[place] ^ GAMMA)
        if second >> 32 < int(0.8 * 2**32):
            seen[place] = tokenizer.mask_id
        elif second >> 32 < int(0.9 * 2**32):
            seen[place] = ordinary[((second & 0xFFFFFFFF) * len(ordinary)) >> 32]
    return seen, chosen


@pytest.mark.parametrize("unit", ["token", "word"])
@pytest.mark.parametrize(("prob", "cap"), [(0.15, None), (0.15, 4), (0.5, None), (0.02, 1)])
def test_equals_a_loop_over_tokens(tokenizer, unit, prob, cap):
    rng = np.random.default_rng(derived(3))
    ids, lengths = batch(tokenizer, [128, 0, 1, 5, *rng.integers(1, 120, 40), 0])
    indices = rng.integers(0, 2**40, len(lengths))
    masker = TokenMasker(
        tokenizer, masked_lm_prob=prob, mask_unit=unit, max_predictions_per_seq=cap, seed=-7
    )
    before = ids.copy()
    result = masker(ids, lengths, indices, epoch=11)
    np.testing.assert_array_equal(ids, before)
    begin, seen, positions = 0, [], []
    for length, index in zip(lengths.tolist(), indices.tolist(), strict=True):
        expected, chosen = reference(
            tokenizer,
            ids[begin : begin + length].tolist(),
            index=index,
            seed=-7,
            epoch=11,
            prob=prob,
            whole_word=unit == "word",
            cap=cap,
        )
        seen += expected
        positions += [begin + place for place in chosen]
        assert bool(chosen) == (length > 0)
        begin += length
    np.testing.assert_array_equal(result.input_ids, seen)
    np.testing.assert_array_equal(result.positions, positions)
    np.testing.assert_array_equal(result.labels, ids[positions])


def test_shares_are_15_percent_and_80_10_10(tokenizer):
    ids, lengths = batch(tokenizer, [100] * 2000)
    result = TokenMasker(tokenizer)(ids, lengths, np.arange(2000), 0)
    assert len(result.positions) == 15 * 2000
    seen = result.input_ids[result.positions]
    masked = np.mean(seen == tokenizer.mask_id)
    kept = np.mean(seen == result.labels)
    assert abs(masked - 0.8) < 0.01  # 4 standard errors
    assert abs(kept - 0.1) < 0.008
    random = seen[(seen != tokenizer.mask_id) & (seen != result.labels)]
    assert random.min() >= 5  # never a special token
    assert len(np.unique(random)) > 900  # of 995; all are equally likely
    untouched = np.delete(np.arange(len(ids)), result.positions)
    np.testing.assert_array_equal(result.input_ids[untouched], ids[untouched])


def test_all_that_is_predicted_may_become_masks(tokenizer):
    ids, lengths = batch(tokenizer, [60] * 30)
    usual, always = (
        TokenMasker(tokenizer, always_mask=always)(ids, lengths, np.arange(30), 0)
        for always in (False, True)
    )
    np.testing.assert_array_equal(always.positions, usual.positions)
    np.testing.assert_array_equal(always.labels, usual.labels)
    assert (always.input_ids[always.positions] == tokenizer.mask_id).all()
    assert not (usual.input_ids[usual.positions] == tokenizer.mask_id).all()


def test_every_position_is_equally_likely(tokenizer):
    ids = np.tile(np.r_[tokenizer.cls_id, np.arange(5, 45), tokenizer.sep_id], 4000)
    result = TokenMasker(tokenizer)(ids, np.full(4000, 42), np.arange(4000), 0)
    counts = np.bincount(result.positions % 42, minlength=42)
    assert counts[0] == counts[41] == 0
    expected = 4000 * 6 / 40
    assert np.sum((counts[1:41] - expected) ** 2 / expected) < 75  # chi-squared, 39 degrees


def test_depends_on_seed_epoch_and_index_only(tokenizer):
    ids, lengths = batch(tokenizer, [60] * 30)
    masker = TokenMasker(tokenizer, seed=5)
    indices = np.arange(100, 130)
    whole = masker(ids, lengths, indices, 2)
    order = np.random.default_rng(derived(0)).permutation(30)
    shuffled = masker(ids.reshape(30, 60)[order].ravel(), lengths, indices[order], 2)
    np.testing.assert_array_equal(
        shuffled.input_ids.reshape(30, 60), whole.input_ids.reshape(30, 60)[order]
    )
    part = masker(ids[:600], lengths[:10], indices[:10], 2)
    np.testing.assert_array_equal(part.input_ids, whole.input_ids[:600])

    def overlap(other):
        return len(np.intersect1d(other.positions, whole.positions)) / len(whole.positions)

    assert overlap(masker(ids, lengths, indices, 2)) == 1
    assert overlap(masker(ids, lengths, indices, 3)) < 0.3
    assert overlap(masker(ids, lengths, indices + 1, 2)) < 0.3
    assert overlap(TokenMasker(tokenizer, seed=6)(ids, lengths, indices, 2)) < 0.3


def test_whole_words_stay_whole(tokenizer):
    ids, lengths = batch(tokenizer, [100] * 50)
    result = TokenMasker(tokenizer, mask_unit="word")(ids, lengths, np.arange(50), 0)
    chosen = np.zeros(len(ids), bool)
    chosen[result.positions] = True
    ordinary = ~np.isin(ids, tokenizer.unmaskable_ids)
    continues = np.flatnonzero(tokenizer.is_continuation[ids] & ordinary & np.roll(ordinary, 1))
    np.testing.assert_array_equal(chosen[continues], chosen[continues - 1])
    assert chosen[continues].any()
    counts = chosen.reshape(50, 100).sum(1)
    assert counts.max() <= 15
    assert counts.mean() > 14


def spans_of(tokenizer, ids, *, index, quota):
    """{position: first token of the span that has chosen it} of one sequence, span by span."""
    state = mix((mix(mix(0)) + index * GAMMA) & M64)
    hashes = [mix((state + place * GAMMA) & M64) for place in range(len(ids))]
    runs: list[list[list[int]]] = []
    for place, token in enumerate(ids):
        if token in tokenizer.unmaskable_ids:
            runs.append([])
        elif not runs or not runs[-1] or not tokenizer.is_continuation[token]:
            runs = runs or [[]]
            runs[-1].append([place])
        else:
            runs[-1][-1].append(place)
    spans = []
    for run in runs:
        for first, word in enumerate(run):
            draw = mix(hashes[word[0]] ^ M64) >> 32
            weights = [Fraction(4, 5) ** n for n in range(10)]
            below = [sum(weights[: n + 1]) / sum(weights) * 2**32 for n in range(10)]
            words = next(n + 1 for n in range(10) if draw < int(below[n]))
            spans.append((hashes[word[0]] >> 40, word[0], [*chain(*run[first : first + words])]))
    chosen: dict[int, int] = {}
    for _, head, places in sorted(spans):
        for place in places:
            if place not in chosen and len(chosen) < quota:
                chosen[place] = head
    return chosen, hashes


@pytest.mark.parametrize(("prob", "cap"), [(0.15, None), (0.15, 4), (0.6, None)])
def test_spans_equal_a_loop_over_spans(tokenizer, prob, cap):
    rng = np.random.default_rng(derived(8))
    ids, lengths = batch(tokenizer, [90, 0, 1, 5, 2, *rng.integers(1, 100, 25), 0])
    indices = rng.integers(0, 2**40, len(lengths))
    masker = TokenMasker(
        tokenizer, masked_lm_prob=prob, mask_unit="span", max_predictions_per_seq=cap
    )
    result = masker(ids, lengths, indices, epoch=0)
    expected = {}
    for begin, length, index in zip(
        np.cumsum(lengths) - lengths, lengths.tolist(), indices.tolist(), strict=True
    ):
        quota = min(max(1, round(length * prob)), cap or length + 1)
        given = ids[begin : begin + length].tolist()
        chosen, hashes = spans_of(tokenizer, given, index=index, quota=quota)
        for place, head in chosen.items():
            action = mix(hashes[head] ^ GAMMA) >> 32
            draw = (mix(hashes[place] ^ GAMMA) & 0xFFFFFFFF) * (tokenizer.vocab_size - 5)
            kept = given[place] if action >= int(0.9 * 2**32) else 5 + (draw >> 32)
            expected[begin + place] = tokenizer.mask_id if action < int(0.8 * 2**32) else kept
    assert result.positions.tolist() == sorted(expected)
    assert result.input_ids[result.positions].tolist() == [expected[p] for p in sorted(expected)]
    np.testing.assert_array_equal(result.labels, ids[result.positions])


def test_spans_are_replaced_as_one(tokenizer):
    ids = np.tile(np.arange(5, 65), 4000)  # each token a word
    masker = TokenMasker(tokenizer, masked_lm_prob=0.17, mask_unit="span")  # 10 tokens
    result = masker(ids, np.full(4000, 60), np.arange(4000), 0)
    assert len(result.positions) == 40_000
    place = result.positions.reshape(4000, 10) % 60
    runs = 1 + (np.diff(place, axis=1) > 1).sum(1)
    # Spans of 3.8 words on average: more than two and less than four have room for 10 words.
    assert 2.0 < runs.mean() < 4.0
    seen = result.input_ids[result.positions].reshape(4000, 10)
    masked = seen == tokenizer.mask_id
    assert abs(masked.mean() - 0.8) < 0.02
    joined = np.diff(place, axis=1) == 1
    together = (masked[:, 1:] == masked[:, :-1])[joined]
    assert together.mean() > 0.9  # of tokens one by one 0.68


def test_the_rate_follows_progress(tokenizer):
    ids, lengths = batch(tokenizer, [100] * 20)
    masker = TokenMasker(tokenizer, masked_lm_prob=[0.3, 0.15], seed=3)
    constant = {rate: TokenMasker(tokenizer, masked_lm_prob=rate, seed=3) for rate in (0.3, 0.15)}
    counts = [
        len(masker(ids, lengths, np.arange(20), 1, progress).positions)
        for progress in (0.0, 0.2, 0.5, 0.9, 1.0)
    ]
    assert counts == [20 * n for n in (30, 27, 22, 16, 15)]
    for progress, rate in ((0.0, 0.3), (1.0, 0.15)):
        ours = masker(ids, lengths, np.arange(20), 1, progress)
        theirs = constant[rate](ids, lengths, np.arange(20), 1, 0.5)
        for left, right in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(left, right)
    default = masker(ids, lengths, np.arange(20), 1)
    assert len(default.positions) == 20 * 15  # as at the end of training
    few = masker(ids, lengths, np.arange(20), 1, 1.0).positions
    many = masker(ids, lengths, np.arange(20), 1, 0.0).positions
    assert np.isin(few, many).all()  # a lower rate only leaves tokens out


def test_empty_batches_and_unmaskable_sequences(tokenizer):
    for unit in ("token", "word", "span"):
        masker = TokenMasker(tokenizer, mask_unit=unit)
        empty = np.empty(0, np.int64)
        for lengths in (empty, np.zeros(3, np.int64)):
            result = masker(empty, lengths, np.arange(len(lengths)), 0)
            assert [array.dtype for array in result] == [np.int64] * 3
            assert [len(array) for array in result] == [0] * 3
        special = np.array([tokenizer.cls_id, tokenizer.sep_id])
        result = masker(special, np.array([2]), np.array([0]), 0)
        assert len(result.positions) == 0
        np.testing.assert_array_equal(result.input_ids, special)


@pytest.mark.parametrize(
    "bad",
    [
        {"masked_lm_prob": 0.0},
        {"masked_lm_prob": 1.0},
        {"masked_lm_prob": [0.3, 0.0]},
        {"masked_lm_prob": [0.3, 0.2, 0.1]},
        {"masked_lm_prob": []},
        {"mask_unit": "sentence"},
        {"max_predictions_per_seq": 0},
    ],
)
def test_bad_arguments_are_named(tokenizer, bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))}: expected"):
        TokenMasker(tokenizer, **bad)


def test_sizes_must_fit(tokenizer):
    ids = np.arange(5, 15)
    for lengths, indices in (([9], [0]), ([10], [0, 1])):
        with pytest.raises(ValueError, match="lengths: expected"):
            TokenMasker(tokenizer)(ids, np.array(lengths), np.array(indices), 0)


def test_ids_and_lengths_must_be_possible(tokenizer):
    masker = TokenMasker(tokenizer)
    for bad in (-1, 1000, 2**40):
        with pytest.raises(ValueError, match=f"tokens: expected ids of 0 to 999, got {bad}"):
            masker(np.array([7, bad, 8]), np.array([3]), np.array([0]), 0)
    with pytest.raises(ValueError, match="lengths: expected at most 65535, got 65536"):
        masker(np.full(65_536, 7), np.array([65_536]), np.array([0]), 0)
    longest = masker(np.full(65_535, 7), np.array([65_535]), np.array([0]), 0)
    assert len(longest.positions) == 9830  # 15 %


@pytest.mark.parametrize("unit", ["token", "word", "span"])
def test_the_same_from_any_type_thread_and_process(tokenizer, unit):
    ids, lengths = batch(tokenizer, np.random.default_rng(derived(4)).integers(1, 90, 200))
    indices = np.arange(200)
    masker = TokenMasker(tokenizer, mask_unit=unit, masked_lm_prob=[0.3, 0.2], seed=9)
    expected = masker(ids, lengths, indices, 1, 0.5)

    def equal(found):
        return all(np.array_equal(x, y) for x, y in zip(found, expected, strict=True))

    for dtype in (np.uint16, np.int16, np.uint32, np.int32):
        assert equal(masker(ids.astype(dtype), lengths, indices, 1, 0.5))
    assert equal(masker(np.repeat(ids, 2)[::2], lengths.tolist(), indices, 1, 0.5))
    assert equal(pickle.loads(pickle.dumps(masker))(ids, lengths, indices, 1, 0.5))
    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(masker, ids, lengths, indices, 1, 0.5) for _ in range(16)]
        assert all(equal(call.result()) for call in calls)


def test_most_frequent_token_rate_leaves_special_tokens_out(tmp_path):
    about = {"vocab_size": 20, "unmaskable_ids": (0, 2, 3, 4), "max_seq_length": 20}
    one = np.ones(1, np.int64)
    with ShardWriter(tmp_path / "a", **about) as writer:
        tokens = np.array([2, 7, 7, 7, 9, 3, 1, 8, 3, 3, 3])
        writer.append(tokens, np.array([len(tokens)]), one, one)
    assert most_frequent_token_rate(ShardDataset(tmp_path / "a")) == 3 / 6
    with ShardWriter(tmp_path / "b", **about):
        pass
    assert most_frequent_token_rate(ShardDataset(tmp_path / "b")) == 0
