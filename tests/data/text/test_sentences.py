"""Sentences: the C++ against regular expressions, documents at blank lines, long sentences."""

import hashlib
import itertools
import random
import re
from collections import Counter

import numpy as np
import pytest

from bert_unpad._text import CharacterCounts, Splitter
from bert_unpad.data.text.sentences import clean, held_out, is_held_out, split_sentences
from bert_unpad.data.text.tokenizer import LetterCounts
from tests.support import sentences as reference
from tests.support.seeds import derived

SPACES = " \t\n\r\x0b\x1c\x85\xa0\u1680\u2003\u2028\u205f\u3000"
MARKS = ".!?.!?\"')](['`*<-_\u3002\uff01\uff1f\u201d\u300d\uff09"
LETTERS = "abAB19I\xe9\xc9\xdf\u0416\u0436\u4e00\u05d0\xb2\u2160\U0001f600\U00010400\x00"
WORDS = ["Dr.", "e.g.", "(Fig.", "J.", "I.", "et al.", "U.S.", "No.", "no", "\u4e00\u3002\u4e8c"]


def random_text(rng):
    """Mostly what the rules look at."""
    parts = []
    for _ in range(rng.randint(0, 60)):
        parts.append(rng.choice(WORDS if rng.random() < 0.2 else LETTERS))
        parts.append("".join(rng.choices(MARKS, k=rng.choice([0, 0, 1, 1, 2, 3]))))
        parts.append("".join(rng.choices(SPACES, k=rng.choice([0, 1, 1, 1, 2, 3]))))
    return "".join(parts)


def test_sentences_are_those_of_the_regular_expressions():
    rng = random.Random(derived(0))
    for _ in range(5000):
        text = random_text(rng)
        assert split_sentences(text) == reference.split_sentences(text), repr(text)


def test_documents_end_at_blank_lines_or_where_told():
    rng = random.Random(derived(0))
    for _ in range(500):
        text = random_text(rng)
        apart = clean(text.encode())
        documents = re.split(r"\n\s*\n", text)
        expected = [s for s in map(reference.split_sentences, documents) if s]
        assert sentences_of(apart) == expected
        together = clean(text.encode(), np.array([len(text.encode())]))
        assert sentences_of(together) == [s for s in [reference.split_sentences(text)] if s]


def sentences_of(found):
    ends = found.ends.tolist()
    documents = [found.text[a:b].decode() for a, b in itertools.pairwise([0, *ends])]
    assert all(document.endswith("\n") for document in documents)
    lists = [document.split("\n")[:-1] for document in documents]
    assert [len(sentences) for sentences in lists] == found.sentences.tolist()
    return lists


def test_long_sentences_are_cut_at_spaces_or_between_letters():
    words = ["word"] * 10_000
    parts = split_sentences(" ".join(words))
    assert " ".join(parts).split() == words
    assert all(16_000 < len(part) <= 16_384 for part in parts[:-1])
    letters = "\u4e00" * 20_000
    parts = split_sentences(letters)
    assert "".join(parts) == letters
    assert max(len(part.encode()) for part in parts) <= 16_384 + 2


def test_documents_are_known_by_their_words():
    one = clean(b"A b.  C\n\nd. E", np.array([8, 13]))
    assert one.ends.tolist() == [7, 12]
    digests = [hashlib.sha256(text).digest() for text in (b"A b. C", b"d. E")]
    expected = [[int.from_bytes(d[i : i + 8], "big") for i in (0, 8)] for d in digests]
    assert one.digests().tolist() == expected
    share = (expected[0][0] + 1) / 2**64
    assert is_held_out(["A b.", "C"], min(share * 1.001, 0.999))
    assert not is_held_out(["A b.", "C"], share * 0.999)
    hashes = np.random.default_rng(derived(0)).integers(0, 2**64, 10_000, np.uint64)
    assert 800 < held_out(hashes, 0.1).sum() < 1200


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ([5, 3], "ends: expected ends that rise to at most 6, got 3"),
        ([7], "ends: expected ends that rise to at most 6, got 7"),
        ([-1], "ends: expected ends that rise to at most 6, got -1"),
    ],
)
def test_bad_ends_are_named(ends, message):
    with pytest.raises(ValueError, match=message):
        Splitter(b"").split(b"A b. C", np.array(ends))
    with pytest.raises(TypeError, match="ends: expected a contiguous one-dimensional array of int"):
        Splitter(b"").split(b"A b. C", np.array(ends, np.float32))


def test_invalid_text_does_no_harm():
    rng = random.Random(derived(0))
    splitter = Splitter(bytes([1] * 300))
    for _ in range(2000):
        data = bytes(rng.choices(b"\xe3\xef\x80\x82\xe2\xc2\xf0\xff. A\n", k=rng.randint(0, 40)))
        text, ends, counts = splitter.split(data)
        assert len(text) >= 2 * counts.sum()
        assert not len(ends) or ends[-1] == len(text)
    assert split_sentences("A \ud800 lone surrogate.") == ["A ? lone surrogate."]


def test_letters_are_counted():
    rng = random.Random(derived(0))
    texts = ["".join(rng.choices(LETTERS + " ", k=50)) for _ in range(40)]
    counts = CharacterCounts()
    letters = LetterCounts()
    for text in texts:
        counts.add(text.encode())
        letters.add(text)
    expected = Counter("".join(texts))
    found = counts.counts()
    assert {chr(code): found[code] for code in np.flatnonzero(found)} == expected
    del expected[" "]
    assert letters.all() == set(expected)
    order = sorted(expected, key=lambda letter: (-expected[letter], letter))
    for count in (0, 1, 5, len(order), 10**6):
        assert letters.most_frequent(count) == set(order[:count])
    for _ in range(500):  # what is no UTF-8 does no harm
        counts.add(bytes(rng.choices(b"\xf4\xff\xe3\x80\xc2 A", k=rng.randint(0, 9))))
    assert LetterCounts().all() == set()
