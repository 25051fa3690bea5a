"""What a tokenizer is, and WordPiece (Wu et al. 2016, arXiv:1609.08144; BERT's, arXiv:1810.04805).

A thin layer over Hugging Face's `tokenizers`. It knows which ids are special and which tokens
continue a word (masking needs both as arrays), and stores WordPiece's vocabulary as `vocab.txt`,
which `transformers.BertTokenizerFast.from_pretrained` reads.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from bert_unpad._files import read_json_object
from bert_unpad._text import CharacterCounts

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CONTINUATION = "##"
FILE = "tokenizer.json"
CONFIG = "tokenizer_config.json"
_SEPARATOR = "\u2e2e"  # a reversed question mark, hardly ever in a text
_TOGETHER = 50  # sentences converted as one text
_MAX_WORD = 100  # characters; BERT's tokenizers convert longer words to [UNK]


class TextTokenizer:
    """Converts text to ids; what all tokenizers have.

    Special tokens written in a text (a literal "[SEP]") are ordinary characters, so that no text
    can forge the structure of an example.

    Attributes:
        vocabulary: the tokens; a token's index is its id.
        pad_id, unk_id: ids of special tokens; None where there is none.
        cls_id, sep_id, mask_id: ids of the special tokens that examples need.
        unmaskable_ids: ids that are never predicted: the special tokens but the unknown one, which
            stands for a word of the text and is predicted, as in Google's BERT.
        is_continuation: bool [vocab_size], True for tokens that continue a word ("##ing").
        files: names of the files of `save`.
    """

    vocabulary: tuple[str, ...]
    pad_id: int | None
    unk_id: int | None
    cls_id: int
    sep_id: int
    mask_id: int
    unmaskable_ids: tuple[int, ...]
    is_continuation: NDArray[np.bool_]
    files: tuple[str, ...]
    _tokenizer: Tokenizer

    @property
    def vocab_size(self) -> int:
        """The number of ids."""
        return len(self.vocabulary)

    def identity(self) -> dict[str, Any]:
        """Returns JSON values that differ for tokenizers that give other ids."""
        raise NotImplementedError

    def save(self, folder: str | Path) -> None:
        """Writes `files` in Hugging Face's layout."""
        raise NotImplementedError

    def export(self, folder: str | Path, max_length: int, *, token_types: bool) -> None:
        """Writes `files` and tokenizer.json, with which `AutoTokenizer` alone gives training's ids.

        Args:
            folder: made if it does not exist.
            max_length: tokens that `truncation=True` leaves of a text.
            token_types: the model takes token types.
        """
        self.save(folder)
        ids = {"pad": self.pad_id, "unk": self.unk_id}
        ids |= {"cls": self.cls_id, "sep": self.sep_id, "mask": self.mask_id}
        names = ["input_ids", "token_type_ids", "attention_mask"]
        config = read_json_object(Path(folder) / CONFIG) | {
            "model_max_length": max_length,
            "model_input_names": [x for x in names if token_types or x != "token_type_ids"],
            **{f"{x}_token": self.vocabulary[i] for x, i in ids.items() if i is not None},
        }
        (Path(folder) / CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        tokenizer = self._exported()
        (own,) = self.encode_batch(["a"])
        if tokenizer.encode("a").ids != [self.cls_id, *own, self.sep_id]:
            cls, sep = config["cls_token"], config["sep_token"]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{cls} $A {sep}",
                pair=f"{cls} $A {sep} $B:1 {sep}:1",
                special_tokens=[(cls, self.cls_id), (sep, self.sep_id)],
            )
        (Path(folder) / FILE).write_text(tokenizer.to_str(), "utf-8")

    def _exported(self) -> Tokenizer:
        """A tokenizer of the library that gives the ids of `encode_batch`, for `export`."""
        raise NotImplementedError

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Converts each text to ids, without special tokens."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_sentences(
        self, sentences: Sequence[str]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Converts S sentences to ids, as `encode_batch` does, end to end.

        Returns:
            int32 [tokens], ids of all sentences; int64 [S], the number of each one's.
        """
        encoded = self.encode_batch(sentences)
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        return _flat(encoded, int(lengths.sum())), lengths

    def decode(self, ids: Iterable[int]) -> str:
        """Converts ids to readable text; joins parts of words, keeps special tokens."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)


class WordPieceTokenizer(TextTokenizer):
    """Converts text to WordPiece ids.

    Args:
        vocabulary: the tokens; a token's index is its id. Must hold the five special tokens, at any
            index (a trained vocabulary has them at 0 to 4).
        lowercase: lower-case the text and strip accents (BERT's "uncased").

    Raises:
        ValueError: a special token is missing, or a token occurs twice.
    """

    files = ("vocab.txt", CONFIG)

    def __init__(self, vocabulary: Sequence[str], lowercase: bool = True) -> None:
        ids = {token: index for index, token in enumerate(vocabulary)}
        missing = [token for token in SPECIAL_TOKENS if token not in ids]
        if missing:
            raise ValueError(
                f"vocabulary: expected the special tokens {' '.join(SPECIAL_TOKENS)}; "
                f"missing: {' '.join(missing)}"
            )
        if len(ids) != len(vocabulary):
            twice = next(token for index, token in enumerate(vocabulary) if ids[token] != index)
            raise ValueError(f"vocabulary: expected every token once; {twice!r} is there twice")
        self.vocabulary = tuple(vocabulary)
        self.lowercase = lowercase
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = (
            ids[token] for token in SPECIAL_TOKENS
        )
        self.unmaskable_ids = tuple(sorted((self.pad_id, self.cls_id, self.sep_id, self.mask_id)))
        self.is_continuation = np.array([t.startswith(CONTINUATION) for t in vocabulary])
        self._tokenizer = _pipeline(_model(ids), lowercase)

    def encode_sentences(
        self, sentences: Sequence[str]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """See `TextTokenizer`."""
        # The library takes a third longer for single sentences than for many as one text. So they
        # are joined by a character that becomes an id of its own: words are converted one by one.
        joined = [
            f" {_SEPARATOR} ".join([*sentences[first : first + _TOGETHER], ""])
            for first in range(0, len(sentences), _TOGETHER)
        ]
        if sum(text.count(_SEPARATOR) for text in joined) != len(sentences):
            return super().encode_sentences(sentences)
        encodings = self._separating.encode_batch_fast(joined, add_special_tokens=False)
        encoded = [encoding.ids for encoding in encodings]
        flat = _flat(encoded, sum(map(len, encoded)))
        ends = flat == self.vocab_size
        return flat[~ends], np.diff(np.flatnonzero(ends), prepend=-1) - 1

    @functools.cached_property
    def _separating(self) -> Tokenizer:
        """The same tokenizer with the separator as one more token."""
        ids = {token: index for index, token in enumerate(self.vocabulary)}
        ids[_SEPARATOR] = self.vocab_size
        return _pipeline(_model(ids), self.lowercase)

    @classmethod
    def train(
        cls,
        read: Callable[[], Iterable[Sequence[str]]],
        vocab_size: int,
        lowercase: bool = True,
        limit_alphabet: int = 1000,
    ) -> WordPieceTokenizer:
        """Trains at most `vocab_size` tokens; the same texts always give the same vocabulary.

        Words of more than 100 characters are left out: they become [UNK] anyway, and the training
        time of a word grows with the square of its length.

        Args:
            read: called twice; returns an iterable of lists of texts.
            vocab_size: largest number of tokens, with special tokens and letters. A small corpus
                gives fewer, because pairs that occur once are not merged.
            lowercase: see the class.
            limit_alphabet: number of letters to keep, the most frequent ones; words with other
                letters become [UNK].

        Raises:
            ValueError: `vocab_size` is too small for the special tokens and the corpus's letters.
        """
        # The trainer numbers continuing letters in the order of a hash map of words, and breaks
        # ties between merges by these numbers: two runs give two vocabularies. So a first pass
        # without merges finds the letters, and a second is given them all, sorted.
        learner = _learner(lowercase)
        letters = LetterCounts()
        # Its own normalizer: the learner is locked while it trains, asking it would never return.
        normalizer = normalizers.BertNormalizer(lowercase=lowercase)

        def counted() -> Iterator[Sequence[str]]:
            for texts in read():
                letters.add(normalizer.normalize_str(" ".join(texts)))
                yield texts

        learner.train_from_iterator(counted(), _trainer(len(SPECIAL_TOKENS), SPECIAL_TOKENS))
        kept = letters.most_frequent(limit_alphabet)
        found = [token for token in learner.get_vocab() if token not in SPECIAL_TOKENS]
        alphabet = [
            *sorted(token for token in found if token in kept),
            *sorted(t for t in found if t[:2] == CONTINUATION and t[2:] in kept),
        ]
        base = (*SPECIAL_TOKENS, *alphabet)
        if len(base) > vocab_size:
            raise ValueError(
                f"vocab_size: expected at least {len(base)} for the special tokens and the letters "
                f"of this corpus, got {vocab_size}"
            )
        learner = _learner(lowercase)
        learner.train_from_iterator(read(), _trainer(vocab_size, base, limit_alphabet=0))
        ids = learner.get_vocab()
        return cls(sorted(ids, key=ids.__getitem__), lowercase)

    @classmethod
    def from_vocab_file(cls, path: str | Path, lowercase: bool = True) -> WordPieceTokenizer:
        """Reads a BERT vocabulary in UTF-8, one token per line; the line's number is the id.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is not UTF-8, a special token is missing, or a token occurs twice.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(
                f"vocab_file: {path} does not exist; expected a file with one token a line"
            )
        try:
            # Not splitlines(): it splits at characters that real vocabularies contain.
            lines = path.read_text("utf-8-sig").rstrip("\n").split("\n")
            return cls([line.rstrip("\r") for line in lines], lowercase)
        except ValueError as error:
            raise ValueError(f"vocab_file: {path}: {error}") from error

    def identity(self) -> dict[str, Any]:
        """See `TextTokenizer`."""
        vocabulary = hashlib.sha256("\n".join(self.vocabulary).encode()).hexdigest()
        return {"vocabulary": vocabulary, "lowercase": self.lowercase}

    def save(self, folder: str | Path) -> None:
        """Writes `vocab.txt` and `tokenizer_config.json` in Hugging Face's layout."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        text = "".join(f"{token}\n" for token in self.vocabulary)
        (folder / "vocab.txt").write_text(text, "utf-8")
        config = {"tokenizer_class": "BertTokenizerFast", "do_lower_case": self.lowercase}
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")

    def _exported(self) -> Tokenizer:
        tokenizer = Tokenizer.from_str(self._tokenizer.to_str())
        tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
        return tokenizer

    @classmethod
    def load(cls, folder: str | Path) -> WordPieceTokenizer:
        """Reads the files of `save`, or of a Hugging Face BERT's slow tokenizer.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file is damaged; the message names it.
        """
        folder = Path(folder)
        path = folder / CONFIG
        lowercase = read_json_object(path).get("do_lower_case", True)
        if not isinstance(lowercase, bool):
            raise ValueError(f"{path}: do_lower_case: expected true or false, got {lowercase!r}")
        return cls.from_vocab_file(folder / "vocab.txt", lowercase)


class LetterCounts:
    """Counts the letters of texts: all characters but spaces."""

    def __init__(self) -> None:
        self._counts = CharacterCounts()

    def add(self, text: str) -> None:
        """Counts the letters of a text."""
        self._counts.add(text.encode())

    def all(self) -> set[str]:
        """The letters that have occurred."""
        return self.most_frequent(sys.maxunicode)

    def most_frequent(self, count: int) -> set[str]:
        """The most frequent letters, of equally frequent ones the first."""
        counts = self._counts.counts()
        counts[ord(" ")] = 0
        order = np.argsort(-counts, kind="stable")[:count]
        return {chr(code) for code in order[counts[order] > 0]}


def _flat(encoded: Iterable[Sequence[int]], size: int) -> NDArray[np.int32]:
    return np.fromiter(itertools.chain.from_iterable(encoded), np.int32, size)


def _model(ids: dict[str, int]) -> models.WordPiece:
    return models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=_MAX_WORD)


def _pipeline(model: models.Model, lowercase: bool) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=CONTINUATION)
    return tokenizer


def _learner(lowercase: bool) -> Tokenizer:
    """Makes a tokenizer for training that drops words that are too long."""
    tokenizer = _pipeline(models.WordPiece(unk_token="[UNK]"), lowercase)
    too_long = pre_tokenizers.Split(Regex(f".{{{_MAX_WORD + 1},}}"), "removed")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([tokenizer.pre_tokenizer, too_long])
    return tokenizer


def _trainer(
    vocab_size: int, first_tokens: Sequence[str], limit_alphabet: int = sys.maxunicode
) -> trainers.WordPieceTrainer:
    return trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(first_tokens),
        continuing_subword_prefix=CONTINUATION,
        show_progress=False,
        limit_alphabet=limit_alphabet,
    )
