"""Splits documents into sentences, by C++ (csrc/text/sentences.h says where a sentence ends).

Cleaned text has a sentence a line, with single spaces between words. What identifies a document is
the SHA-256 of its words: two documents are the same if they differ only in white space.
"""

import functools
import hashlib
import itertools
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bert_unpad._text import Splitter


@dataclass(frozen=True)
class CleanText:
    """Documents, cleaned and split into sentences.

    Attributes:
        text: UTF-8, each sentence followed by a line feed.
        ends: int64 [documents], where each document ends in `text`.
        sentences: int64 [documents], number of sentences of each, at least 1.
    """

    text: bytes
    ends: NDArray[np.int64]
    sentences: NDArray[np.int64]

    def digests(self) -> NDArray[np.uint64]:
        """The first 16 bytes of each document's SHA-256, uint64 [documents, 2]."""
        words = memoryview(self.text.replace(b"\n", b" "))
        bounds = itertools.pairwise([0, *self.ends.tolist()])
        found = (hashlib.sha256(words[begin : end - 1]).digest()[:16] for begin, end in bounds)
        return np.frombuffer(b"".join(found), ">u8").astype(np.uint64).reshape(-1, 2)


def clean(text: bytes, ends: NDArray[np.int64] | None = None) -> CleanText:
    """Splits documents into sentences; those without text are left out.

    Args:
        text: UTF-8.
        ends: int64 [D], where each document ends in `text`; None: a blank line ends one.
    """
    return CleanText(*_splitter().split(text, ends))


def split_sentences(text: str) -> list[str]:
    """Splits one document into sentences, with white space reduced to single spaces.

    A blank line always ends a sentence. Other line breaks have no meaning (text may be wrapped): a
    sentence ends at ., ! or ? before a capital letter or digit, unless a known abbreviation or an
    initial ends there. A lone surrogate, which UTF-8 does not have, becomes a question mark.
    """
    data = text.encode("utf-8", "replace")
    return clean(data, np.array([len(data)])).text.decode().split("\n")[:-1]


def is_held_out(sentences: Sequence[str], share: float) -> bool:
    """Whether the text of a document makes `held_out` choose it."""
    text = "".join(f"{sentence}\n" for sentence in sentences).encode()
    one = CleanText(text, np.array([len(text)]), np.array([len(sentences)]))
    return bool(held_out(one.digests()[:, 0], share)[0])


def held_out(hashes: NDArray[np.uint64], share: float) -> NDArray[np.bool_]:
    """Chooses about `share` of the documents to hold out, bool [documents].

    A document's text decides, so the choice does not change with a growing corpus or another seed.

    Args:
        hashes: uint64 [documents], the first numbers of their digests.
        share: 0 to 1, less than 1.
    """
    return hashes < np.uint64(int(share * 2**64))


@functools.cache
def _splitter() -> Splitter:
    """Made at first use: asking Python what all code points are takes 0.1 s."""
    characters = "".join(map(chr, range(sys.maxunicode + 1)))
    kinds = np.zeros(len(characters), np.uint8)
    for run in re.finditer(r"[^\W_]+", characters):
        upper = np.array([character.isupper() for character in run[0]], np.uint8)
        kinds[run.start() : run.end()] = 1 + 2 * upper
    return Splitter(kinds.tobytes())
