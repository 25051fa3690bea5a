"""The tasks that benchmarks.downstream makes of docstrings."""

import random
from itertools import pairwise

from benchmarks.downstream import exchanged, rows_of, sentences
from tests.support.seeds import derived

TEXT = """Return the number of the rows that have been read. A short one. It raises an error

if the file has been closed before this call. x = f(y) is code and is not taken here. The caller
has to close the file after all rows have been read."""


def test_sentences_are_of_plain_words():
    assert sentences(TEXT) == [
        "Return the number of the rows that have been read.",
        "It raises an error if the file has been closed before this call.",
        "The caller has to close the file after all rows have been read.",
    ]


def test_two_different_words_change_places():
    text = "The one word word here is the last."
    for draw in range(20):
        words, found = text.split(), exchanged(text, random.Random(derived(draw))).split()
        changed = [i for i, word in enumerate(words) if found[i] != word]
        assert changed in [[i, i + 1] for i in range(1, len(words) - 2)]
        assert sorted(words) == sorted(found)


def test_half_of_the_rows_are_of_each_class():
    documents = [[f"Document {i} has sentence {j} here." for j in range(4)] for i in range(10)]
    found = rows_of(documents, random.Random(derived(0)))
    follows = {(a, b) for texts in documents for a, b in pairwise(texts)}
    assert len(found["cola"]) == 40
    assert len(found["rte"]) == 30
    for rows in found.values():
        assert sum(row["label"] for row in rows) == len(rows) // 2
    for row in found["cola"]:
        assert bool(row["label"]) == any(row["sentence"] in texts for texts in documents)
    for row in found["rte"]:
        if not row["label"]:
            assert (row["sentence1"], row["sentence2"]) in follows
