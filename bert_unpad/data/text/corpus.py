"""Splits documents into sentences and converts them to ids, before pairs are drawn.

A corpus may be a stream, so it is read once into a spool file in the format of Google's BERT: one
sentence per line, and a blank line between documents. Later passes read the spool. So neither text
nor ids have to fit in memory; only a digest per document does, to remove exact duplicates and to
choose held-out documents.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bert_unpad._files import read_json_object, replacing
from bert_unpad.data.random_hash import splitmix64
from bert_unpad.data.store.manifest import count_of
from bert_unpad.data.text.sources import Source
from bert_unpad.data.text.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)

_BLOCK = 8192  # sentences encoded at a time
_SAVE_EVERY = 20_000  # documents between notes of a stream's position: about a minute's reading

# A sentence ends at .!? (and closing quotes) before white space and something that can begin a
# sentence, or at a CJK full stop (escaped: full-width characters are easily misread in source).
_SENTENCE_END = re.compile(
    r"""[.!?]["')\]]*\s+(?=["'(\[`*<-]*[^\W_a-z])|[\u3002\uff01\uff1f]["'\u201d\u300d\uff09]*"""
)
_ABBREVIATION = re.compile(
    r"(?i)al|approx|cf|dr|e\.g|eq|figs?|i\.e|inc|jr|mrs?|ms|no|prof|resp|sec|sr|st|vol|vs"
)


def split_sentences(text: str) -> list[str]:
    """Splits a document into sentences, with white space reduced to single spaces.

    A blank line always ends a sentence. Other line breaks have no meaning (text may be wrapped): a
    sentence ends at ., ! or ? before a capital letter or digit, unless a known abbreviation or an
    initial ends there.
    """
    sentences = []
    for paragraph in re.split(r"\n\s*\n", text):
        paragraph = " ".join(paragraph.split())
        start = 0
        for match in _SENTENCE_END.finditer(paragraph):
            if match[0][0] == "." and _is_abbreviation(paragraph, match.start()):
                continue
            sentences.append(paragraph[start : match.end()].rstrip())
            start = match.end()
        sentences.append(paragraph[start:])
    return [sentence for sentence in sentences if sentence]


def sentences_of(text: str) -> list[str]:
    """Splits a text that may be invalid Unicode into sentences.

    A lone surrogate (possible in a string literal) cannot be stored as UTF-8.
    """
    return split_sentences(text.encode("utf-8", "replace").decode("utf-8"))


def is_held_out(sentences: list[str], share: float) -> bool:
    """Whether the text of a document makes `Spool.held_out` choose it."""
    return _hash(_digest(sentences)) < int(share * 2**64)


def _digest(sentences: list[str]) -> bytes:
    return hashlib.sha256(" ".join(sentences).encode("utf-8")).digest()


def _hash(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big")


def _is_abbreviation(text: str, end: int) -> bool:
    word = text[text.rfind(" ", 0, end) + 1 : end].lstrip("\"'([")
    initial = len(word) == 1 and word.isupper() and word != "I"
    return initial or _ABBREVIATION.fullmatch(word) is not None


@dataclass(frozen=True)
class TokenizedCorpus:
    """Documents as ids, in flat arrays.

    Attributes:
        tokens: [total], ids of all documents end to end, no special tokens.
        sentence_offsets: int64 [sentences + 1], where each sentence begins in `tokens`; no sentence
            is empty.
        document_offsets: int64 [documents + 1], where each document begins among the sentences; no
            document is empty.
    """

    tokens: NDArray[np.integer]
    sentence_offsets: NDArray[np.int64]
    document_offsets: NDArray[np.int64]

    @property
    def documents(self) -> int:
        return len(self.document_offsets) - 1

    def sentence_bounds(self, document: int) -> list[int]:
        """Returns where a document's sentences begin in `tokens`, and where the last one ends."""
        first, last = self.document_offsets[document], self.document_offsets[document + 1]
        return self.sentence_offsets[first : last + 1].tolist()


class Spool:
    """The distinct documents of a corpus in one file, sentences as lines.

    Two documents are the same if their texts differ only in white space. If the source reports its
    position, a file next to the spool saves it now and then, so that hours of reading a stream can
    continue after an interruption.

    Args:
        path: the file to write.
        source: the corpus.
        advance: called with the number of documents read since the last call.

    Attributes:
        documents: number of distinct documents that hold text.
        duplicates: number of documents left out because the same text came before.
        sentences: int64 [documents], number of sentences of each document.
        hashes: uint64 [documents], part of the SHA-256 of each text.
    """

    def __init__(
        self,
        path: Path,
        source: Source,
        advance: Callable[[int], object] = lambda documents: None,
    ) -> None:
        self.path = path
        self.duplicates = 0
        self._seen: set[bytes] = set()
        self._hashes, self._counts = array("Q"), array("q")
        documents = self._resume(source, advance)
        saved_at, previous = len(self._hashes), None
        with path.open("a", encoding="utf-8", newline="\n") as file:
            for text in documents:
                position = getattr(source, "position", None)
                # A new position is that of this document; everything written so far is before it.
                if position is not previous and len(self._hashes) - saved_at >= _SAVE_EVERY:
                    file.flush()
                    self._save(position, path.stat().st_size)
                    saved_at = len(self._hashes)
                previous = position
                advance(1)
                sentences = sentences_of(text)
                if sentences and self._add(sentences):
                    file.write("\n".join(sentences) + "\n\n")
        self.hashes = np.array(self._hashes, np.uint64)
        self.sentences = np.array(self._counts, np.int64)
        self.documents = len(self.hashes)

    def _add(self, sentences: list[str]) -> bool:
        """Adds a document's hash; returns False if the document came before."""
        digest = _digest(sentences)
        if digest[:16] in self._seen:
            self.duplicates += 1
            return False
        self._seen.add(digest[:16])
        self._hashes.append(_hash(digest))
        self._counts.append(len(sentences))
        return True

    @property
    def _position_path(self) -> Path:
        return self.path.with_name(f"{self.path.name}.position.json")

    def _save(self, position: Any, size: int) -> None:
        state = {"position": position, "size": size, "duplicates": self.duplicates}
        with replacing(self._position_path) as temporary:
            temporary.write_text(json.dumps(state), "utf-8")

    def _resume(self, source: Source, advance: Callable[[int], object]) -> Iterator[str]:
        """Yields the documents still to read; first loads what an interrupted reading has left."""
        state = self._saved()
        if state is None:
            self.path.unlink(missing_ok=True)
            return iter(source.documents())
        os.truncate(self.path, state["size"])
        for sentences in _documents_in(self.path):
            self._add(sentences)
        self.duplicates = state["duplicates"]
        advance(len(self._hashes) + self.duplicates)
        logger.info("continuing after %d documents of an interrupted run", len(self._hashes))
        return source.documents(state["position"])

    def _saved(self) -> dict[str, Any] | None:
        """Returns what `_save` wrote, or None if that or the spool is missing or damaged."""
        try:
            state = read_json_object(self._position_path)
            size, _ = (count_of(state, name, sys.maxsize) for name in ("size", "duplicates"))
            complete = "position" in state and self.path.stat().st_size >= size
            return state if complete else None
        except FileNotFoundError:
            return None
        except (KeyError, ValueError) as error:
            logger.warning("reading again: %s is damaged (%s)", self._position_path, error)
            return None

    def held_out(self, share: float) -> NDArray[np.bool_]:
        """Chooses about `share` of the documents to hold out, bool [documents].

        A document's text decides, so the choice does not change with a growing corpus or another
        seed. With a share above 0 and at least two documents, both parts get at least one. A single
        document is not held out.
        """
        chosen = self.hashes < np.uint64(int(share * 2**64))
        if share > 0 and self.documents:
            chosen[self.hashes.argmin()] = True
            chosen[self.hashes.argmax()] = False
        return chosen

    def read(self, which: NDArray[np.bool_]) -> Iterator[list[str]]:
        """Yields the sentences of each document for which `which` (bool [documents]) is True."""
        for document, sentences in enumerate(_documents_in(self.path)):
            if which[document]:
                yield sentences

    def sample(self, which: NDArray[np.bool_], megabytes: float | None) -> Iterator[list[str]]:
        """Yields a random sample of documents, the same every time, in their order.

        Args:
            which: bool [documents], which to choose from.
            megabytes: text of the sample in UTF-8, in 10^6 bytes: nearly as much, and never more
                than one document beyond it. None for all.
        """
        size = self.path.stat().st_size
        if megabytes is None or megabytes * 1e6 >= size:
            yield from self.read(which)
            return
        # Another choice than that of held-out documents, which the hashes themselves make.
        chosen = splitmix64(self.hashes) < np.uint64(int(megabytes * 1e6 / size * 2**64))
        chosen[self.hashes.argmax()] = True  # never held out
        left = megabytes * 1e6
        for sentences in self.read(which & chosen):
            yield sentences
            left -= sum(len(sentence.encode()) + 1 for sentence in sentences)
            if left <= 0:
                return


def _documents_in(path: Path) -> Iterator[list[str]]:
    sentences: list[str] = []
    with path.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            if line != "\n":
                sentences.append(line[:-1])
                continue
            yield sentences
            sentences = []


def tokenize(
    documents: Iterable[list[str]],
    tokenizer: TextTokenizer,
    path: Path,
    *,
    longest: int,
    advance: Callable[[int], object] = lambda sentences: None,
) -> TokenizedCorpus:
    """Converts documents to ids, stored in a memory-mapped file.

    Args:
        documents: lists of sentences.
        tokenizer: converts text to ids.
        path: the file to write the ids to (int32).
        longest: sentences with more tokens than this are cut into pieces of this size, because
            drawing pairs would discard most of them (text without full stops, tables).
        advance: called now and then with the number of sentences done since the last call.
    """
    lengths = _Lengths()
    with path.open("wb") as file:

        def encode(block: list[list[str]]) -> None:
            np.array(lengths.encode(block, tokenizer, longest), np.int32).tofile(file)

        block: list[list[str]] = []
        pending = 0
        for document in documents:
            block.append(document)
            pending += len(document)
            if pending >= _BLOCK:
                encode(block)
                advance(pending)
                block, pending = [], 0
        encode(block)
        advance(pending)
    tokens = np.memmap(path, np.int32, mode="r") if path.stat().st_size else np.empty(0, np.int32)
    return lengths.corpus(tokens.view(np.ndarray))


def tokenize_in_memory(
    documents: list[list[str]], tokenizer: TextTokenizer, longest: int
) -> TokenizedCorpus:
    """Converts documents to ids as `tokenize` does, in memory."""
    lengths = _Lengths()
    return lengths.corpus(np.array(lengths.encode(documents, tokenizer, longest), np.int32))


class _Lengths:
    """Collects lengths of sentences in tokens, and of documents in sentences, while encoding."""

    def __init__(self) -> None:
        self._sentences, self._documents = array("q"), array("q")

    def encode(self, block: list[list[str]], tokenizer: TextTokenizer, longest: int) -> list[int]:
        """Encodes more documents; returns their ids."""
        encoded = iter(tokenizer.encode_batch([s for document in block for s in document]))
        ids: list[int] = []
        for document in block:
            before = len(self._sentences)
            for _ in document:
                sentence = next(encoded)
                ids += sentence
                whole, rest = divmod(len(sentence), longest)
                self._sentences.extend([longest] * whole + [rest] * (rest > 0))
            if len(self._sentences) > before:
                self._documents.append(len(self._sentences) - before)
        return ids

    def corpus(self, tokens: NDArray[np.integer]) -> TokenizedCorpus:
        return TokenizedCorpus(tokens, _offsets(self._sentences), _offsets(self._documents))


def _offsets(lengths: array) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(np.array(lengths, np.int64))]).astype(np.int64)
