"""Sentence pairs: true lengths, labels, truncation, documents of one sentence, determinism."""

import numpy as np
import pytest

from bert_unpad.data import ShardDataset, ShardWriter, WordPieceTokenizer
from bert_unpad.data.text import corpus
from bert_unpad.data.text.corpus import tokenize
from bert_unpad.data.text.examples import make_examples
from bert_unpad.data.text.pairs import PairDrawer
from bert_unpad.data.text.tokenizer import SPECIAL_TOKENS
from tests.support.numbered_corpus import FIRST, VOCAB, corpus_of
from tests.support.seeds import derived


def examples_of(corpus, tokenizer, folder, *, seed=0, short=0.1, longest=64, passes=1):
    about = {"vocab_size": tokenizer.vocab_size, "unmaskable_ids": tokenizer.unmaskable_ids}
    with ShardWriter(folder, max_seq_length=longest, **about) as writer:
        for columns in make_examples(
            corpus,
            tokenizer,
            max_seq_length=longest,
            short_seq_prob=short,
            dupe_factor=passes,
            seed=seed,
        ):
            writer.append(*columns)
    return ShardDataset(folder)


def segments(example, tokenizer):
    ids, second = example.input_ids, example.second_start
    assert ids[0] == tokenizer.cls_id
    assert ids[second - 1] == ids[-1] == tokenizer.sep_id
    a, b = ids[1 : second - 1], ids[second:-1]
    for segment in (a, b):
        assert len(segment)
        np.testing.assert_array_equal(np.diff(segment), 1)  # a run of neighbours in the corpus
    return a, b


def test_pairs_are_what_their_labels_say(tokenizer, tmp_path):
    rng = np.random.default_rng(derived(1))
    documents = [rng.integers(1, 30, rng.integers(1, 12)).tolist() for _ in range(300)]
    corpus = corpus_of(documents)
    dataset = examples_of(corpus, tokenizer, tmp_path / "shard")
    ends = corpus.sentence_offsets[corpus.document_offsets[1:]] + FIRST
    labels, covered, longest = [], set(), 0
    for index in range(len(dataset)):
        example = dataset[index]
        a, b = segments(example, tokenizer)
        document_a, document_b = np.searchsorted(ends, [a[0], b[0]], side="right")
        assert np.searchsorted(ends, a[-1], side="right") == document_a
        assert np.searchsorted(ends, b[-1], side="right") == document_b
        assert (document_a != document_b) == bool(example.next_sentence_label)
        if example.next_sentence_label == 0 and len(example.input_ids) < 64:
            assert b[0] == a[-1] + 1  # untruncated: b goes on where a ends
        labels.append(example.next_sentence_label)
        covered |= set(a.tolist()) | set(b.tolist())
        longest = max(longest, len(example.input_ids))
    assert longest == 64
    assert abs(np.mean(labels) - 0.5) < 3 * 0.5 / np.sqrt(len(labels))
    assert len(covered) > 0.9 * len(corpus.tokens)  # only truncation drops text


def test_documents_of_one_sentence_give_both_labels(tokenizer, tmp_path):
    dataset = examples_of(corpus_of([[12]] * 400), tokenizer, tmp_path / "shard", short=0.0)
    assert len(dataset) == 400
    assert 150 < dataset.next_sentence_labels.sum() < 250
    for index in np.flatnonzero(dataset.next_sentence_labels == 0):
        a, b = segments(dataset[index], tokenizer)
        assert len(a) + len(b) == 12
        assert b[0] == a[-1] + 1


def test_a_sentence_is_cut_between_words_only(tokenizer):
    continues = np.zeros(VOCAB, bool)
    continues[FIRST + 1 : FIRST + 10] = True
    continues[FIRST + 6] = False  # words of 6 and 4 pieces
    drawer = PairDrawer(corpus_of([[10]]), continues, max_seq_length=32, short_seq_prob=0, seed=0)
    assert {pair for _ in range(50) for pair in drawer.draw(0)} == {(0, 6, 6, 10, 0)}


def test_single_word_documents(tokenizer, tmp_path):
    alone = examples_of(corpus_of([[1]]), tokenizer, tmp_path / "alone")
    assert alone[0].input_ids.tolist() == [tokenizer.cls_id, FIRST, tokenizer.sep_id]
    assert alone[0].second_start == 3
    assert alone[0].next_sentence_label == -100

    two = examples_of(corpus_of([[1], [1]]), tokenizer, tmp_path / "two")
    assert two.next_sentence_labels.tolist() == [1, 1]


def test_single_document_has_no_random_next(tokenizer, tmp_path):
    dataset = examples_of(corpus_of([[9] * 40]), tokenizer, tmp_path / "shard", passes=5)
    assert len(dataset) > 20
    assert set(dataset.next_sentence_labels.tolist()) == {0}


def test_truncation_equals_one_token_at_a_time():
    """Sizes after the closed form against Google's loop."""
    rng = np.random.default_rng(derived(2))
    drawer = PairDrawer(
        corpus_of([[1]]), np.zeros(VOCAB, bool), max_seq_length=20, short_seq_prob=0, seed=0
    )
    for a, b in rng.integers(1, 50, (300, 2)).tolist():
        expected_a, expected_b = a, b
        while expected_a + expected_b > 17:
            if expected_a > expected_b:
                expected_a -= 1
            else:
                expected_b -= 1
        begin_a, end_a, begin_b, end_b = drawer._truncate(100, 100 + a, 500, 500 + b)
        assert (end_a - begin_a, end_b - begin_b) == (expected_a, expected_b)
        assert 100 <= begin_a < end_a <= 100 + a
        assert 500 <= begin_b < end_b <= 500 + b


@pytest.mark.parametrize("longest", [5, 6, 64])
def test_lengths_stay_in_bounds_and_short_targets_happen(tokenizer, tmp_path, longest):
    corpus = corpus_of([[7, 3, 1, 20, 2, 5] * 3] * 60)
    plain = examples_of(corpus, tokenizer, tmp_path / "0", longest=longest, short=0.0)
    short = examples_of(corpus, tokenizer, tmp_path / "1", longest=longest, short=1.0)
    assert plain.lengths.min() >= 5
    assert plain.lengths.max() == short.lengths.max() == longest
    if longest == 64:
        assert short.lengths.mean() < 0.8 * plain.lengths.mean()


def test_pairs_follow_from_the_seed(tokenizer, tmp_path):
    corpus = corpus_of([[5, 9, 4, 11]] * 50)
    first, same, other = (
        examples_of(corpus, tokenizer, tmp_path / name, seed=seed, passes=2)
        for name, seed in (("a", "3, train"), ("b", "3, train"), ("c", "4, train"))
    )
    np.testing.assert_array_equal(first.tokens, same.tokens)
    assert not np.array_equal(first.tokens[:500], other.tokens[:500])
    half = len(first) // 2  # the second pass pairs again
    assert not np.array_equal(first.tokens[:500], first.tokens[first.offsets[half] :][:500])


def test_tokenize_cuts_long_sentences_and_drops_empty_ones():
    tokenizer = WordPieceTokenizer([*SPECIAL_TOKENS, "a", "b"])
    documents = [["a b", "\x00"], ["\x00"], ["a " * 25], ["b"]]
    corpus = tokenize(documents, tokenizer, longest=10)
    assert corpus.tokens.tolist() == [5, 6, *[5] * 25, 6]
    assert corpus.sentence_offsets.tolist() == [0, 2, 12, 22, 27, 28]
    assert corpus.document_offsets.tolist() == [0, 1, 4, 5]
    none = tokenize([], tokenizer, longest=10)
    assert (none.documents, len(none.tokens), len(none.sentence_offsets)) == (0, 0, 1)


def test_tokenize_in_batches_is_the_same(monkeypatch):
    tokenizer = WordPieceTokenizer([*SPECIAL_TOKENS, "a", "b"])
    rng = np.random.default_rng(derived(0))
    documents = [
        [" ".join(rng.choice(["a", "b", "\x00"], n)) for n in rng.integers(1, 30, count)]
        for count in rng.integers(1, 20, 40)
    ]
    whole = tokenize(documents, tokenizer, longest=7)
    monkeypatch.setattr(corpus, "_BATCH", 50)
    parts = tokenize(documents, tokenizer, longest=7)
    np.testing.assert_array_equal(parts.tokens, whole.tokens)
    np.testing.assert_array_equal(parts.sentence_offsets, whole.sentence_offsets)
    np.testing.assert_array_equal(parts.document_offsets, whole.document_offsets)
