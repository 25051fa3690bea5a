"""Text that is read during training: a stream of the `datasets` library, one part per rank.

    stream:NAME?config=...&split=...&sample=ROWS

Before training only a sample is read, the first rows, for the vocabulary and the held-out
documents. The rest is tokenized in buffers of documents, in a separate thread, while examples of
the previous buffer are in use. A buffer depends only on its position in the epoch, and `datasets`
can continue reading where a buffer began. So a resumed run reads only its current buffer again.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode

import numpy as np

from bert_unpad.data.objective import Documents, Objective
from bert_unpad.data.prefetch import Prefetcher
from bert_unpad.data.prepared import STREAM
from bert_unpad.data.store.example_batch import ExampleBatch
from bert_unpad.data.streams.stream import (
    check_rank,
    refuse_other_ranks,
    shuffle_by_key,
    token_dtype,
)
from bert_unpad.data.text.corpus import tokenize
from bert_unpad.data.text.examples import make_examples
from bert_unpad.data.text.pairs import SPECIAL_PER_PAIR
from bert_unpad.data.text.sentences import is_held_out, split_sentences
from bert_unpad.data.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from datasets import IterableDataset

_SAMPLE = 20_000  # rows: some 20 MB of text, enough for a vocabulary of 30,000
_CHARACTERS_PER_TOKEN = 4  # about right for English; only decides how much text fills a buffer


def parse_streamed(source: str) -> tuple[str, str]:
    """Returns the specifications, for `HuggingFaceSource`, of the whole stream and its sample."""
    name, _, query = source.removeprefix(STREAM).partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    sample = options.pop("sample", str(_SAMPLE))
    if not sample.isdecimal() or int(sample) < 1:
        raise ValueError(f"source={source!r}: sample must be a positive number of rows")
    for option in ("streaming", "limit"):
        if option in options:
            raise ValueError(f"source={source!r}: stream: has no option {option}")
    options["streaming"] = "true"
    whole = f"{name}?{urlencode(options)}"
    return whole, f"{whole}&limit={sample}"


@dataclass(frozen=True)
class _Buffer:
    """Documents whose examples are made and shuffled together."""

    number: int
    """Number of the buffer in the epoch."""
    documents: list[list[str]]
    before: dict[str, Any] | None
    """State of the data set before these documents; None at the beginning of the data set."""


_Begin = tuple[int, int, int, dict[str, Any] | None]


class TextStream:
    """An `ExampleStream` of one rank's part of a data set's rows of text.

    Each row is a document. Random second segments come from other documents of the same buffer.
    Duplicate documents are not removed. Resuming within an epoch needs the same number of ranks.

    Args:
        dataset: rows of text, the same on all ranks, from `load_dataset(..., streaming=True)`. Its
            shards are divided among the ranks if their number is a multiple of the number of ranks;
            otherwise its rows are.
        tokenizer: converts text to ids.
        rank: this rank, 0 to num_ranks - 1.
        num_ranks: number of ranks that share the data set.
        column: name of the column with the text.
        objective, documents: say what an example is, see `make_examples`.
        max_seq_length: length of the longest example in tokens, at least 5.
        short_seq_prob: see `PairDrawer`.
        held_out_share: share of documents to leave out, as `held_out` chooses them.
        pair_seed: seed of the choice of pairs.
        seed: seed of the shuffling.
        shuffle_buffer: approximate number of examples that are made and shuffled together.
        name: name of the data; a position saved with another name is refused.

    Raises:
        TypeError: `dataset` is not a stream.
        ValueError: an argument is out of range.
    """

    has_masks = False

    def __init__(
        self,
        dataset: IterableDataset,
        tokenizer: TextTokenizer,
        rank: int,
        num_ranks: int,
        *,
        column: str = "text",
        objective: Objective = "mlm_nsp",
        documents: Documents = "apart",
        max_seq_length: int = 128,
        short_seq_prob: float = 0.1,
        held_out_share: float = 0.0,
        pair_seed: int = 0,
        seed: int = 0,
        shuffle_buffer: int = 8192,
        name: str = "",
    ) -> None:
        check_rank(rank, num_ranks)
        if shuffle_buffer < 1:
            raise ValueError(f"shuffle_buffer: expected 1 or more, got {shuffle_buffer}")
        if not hasattr(dataset, "load_state_dict"):
            raise TypeError(
                "dataset: expected an IterableDataset of `datasets` (streaming=True), got "
                f"{type(dataset).__name__}"
            )
        self.vocab_size = tokenizer.vocab_size
        self._dataset, self._column = dataset, column
        self._tokenizer = tokenizer
        self._rank, self._num_ranks = rank, num_ranks
        self._max_seq_length, self._short_seq_prob = max_seq_length, short_seq_prob
        self._objective, self._documents = objective, documents
        self._held_out_share = held_out_share
        self._pair_seed, self._seed = pair_seed, seed
        self._buffer = shuffle_buffer
        self._name = name
        # Where the buffers began that training may still need: epoch, examples before, number and
        # state of the data set. The reading thread appends.
        self._begins: deque[_Begin] = deque()
        self._go_to: _Begin | None = None

    def identity(self) -> dict[str, Any]:
        """See `ExampleStream`."""
        return {
            "name": self._name,
            "column": self._column,
            **self._tokenizer.identity(),
            "objective": self._objective,
            "documents": self._documents,
            "max_seq_length": self._max_seq_length,
            "short_seq_prob": self._short_seq_prob,
            "held_out_share": self._held_out_share,
            "pair_seed": self._pair_seed,
            "seed": self._seed,
            "shuffle_buffer": self._buffer,
        }

    def continue_after(self, epoch: int, past: Sequence[Sequence[int]]) -> None:
        """Raises a ValueError if anything of the epoch has been read."""
        refuse_other_ranks(epoch, past, self._num_ranks)

    def place(self, epoch: int, position: int) -> dict[str, Any] | None:
        """Returns the argument of `go_to` that continues at a position of the epoch.

        Args:
            epoch: the epoch.
            position: number of its examples that this rank has used; must not decrease from call to
                call.

        Returns:
            The beginning of the buffer of that position, as JSON values. None at the beginning of
            an epoch, and if this object has not read that buffer.
        """
        while len(self._begins) > 1 and self._begins[1][:2] <= (epoch, position):
            self._begins.popleft()
        if not self._begins or self._begins[0][:2] > (epoch, position):
            return None
        found, examples, number, state = self._begins[0]
        if found != epoch or state is None:
            return None
        return {"epoch": epoch, "examples": examples, "buffer": number, "state": state}

    def go_to(self, place: dict[str, Any]) -> None:
        """Lets the next `batches` of an epoch skip what comes before a result of `place`.

        Raises:
            ValueError: the argument is not a result of `place`.
        """
        try:
            *counts, state = (place[name] for name in ("epoch", "examples", "buffer", "state"))
        except (KeyError, TypeError) as error:
            raise ValueError(f"place: not a place of TextStream ({error!r})") from error
        if not isinstance(state, dict) or not all(isinstance(n, int) and n >= 0 for n in counts):
            raise ValueError(f"place: expected counts of 0 or more and a state, got {place}")
        self._go_to = (*counts, state)

    def batches(self, epoch: int, start: int, batch_size: int) -> Iterator[ExampleBatch]:
        """See `ExampleStream`.

        Raises:
            ValueError: the data set has no such column, or a row has no text in it.
        """
        position, number, state = 0, 0, None
        if self._go_to is not None and (epoch, 0) <= self._go_to[:2] <= (epoch, start):
            _, position, number, state = self._go_to
        while self._begins and self._begins[-1][:2] >= (epoch, position):
            self._begins.pop()  # left by an earlier call
        left = ExampleBatch.empty(token_dtype(self.vocab_size))
        with Prefetcher(self._examples, self._buffers(number, state), epoch=epoch, depth=1) as made:
            for buffer, examples in made:
                self._begins.append((epoch, position, buffer.number, buffer.before))
                ids = (position + np.arange(len(examples))) * self._num_ranks + self._rank
                examples.ids[:] = ids
                skipped = max(start - position, 0)
                position += len(examples)
                left = ExampleBatch.concatenate([left, examples[skipped:]])
                full = len(left) // batch_size * batch_size
                for first in range(0, full, batch_size):
                    yield left[first : first + batch_size]
                left = left[full:]
        if len(left):
            yield left

    def _buffers(self, number: int, state: dict[str, Any] | None) -> Iterator[_Buffer]:
        """Yields this rank's documents in buffers, from the given one on."""
        part = importlib.import_module("datasets.distributed").split_dataset_by_node(
            self._dataset, self._rank, self._num_ranks
        )
        if state is not None:
            part.load_state_dict(state)
        enough = self._buffer * self._max_seq_length * _CHARACTERS_PER_TOKEN
        documents: list[list[str]] = []
        size = 0
        for row in part:
            text = self._text(row)
            sentences = split_sentences(text)
            if not sentences or is_held_out(sentences, self._held_out_share):
                continue
            documents.append(sentences)
            size += len(text)
            if size >= enough:
                yield _Buffer(number, documents, state)
                number, documents, size, state = number + 1, [], 0, part.state_dict()
        if documents:
            yield _Buffer(number, documents, state)

    def _text(self, row: dict[str, Any]) -> str:
        if self._column not in row:
            raise ValueError(
                f"column: {self._name or 'the data set'} has no column {self._column!r}; expected "
                f"one of {', '.join(row)}"
            )
        text = row[self._column]
        if text is not None and not isinstance(text, str):
            raise ValueError(
                f"column: expected text in column {self._column!r} of "
                f"{self._name or 'the data set'}, got {type(text).__name__}"
            )
        return text or ""

    def _examples(self, buffer: _Buffer, epoch: int) -> tuple[_Buffer, ExampleBatch]:
        """Makes all examples of a buffer, shuffled; ids are set later."""
        tokenizer = self._tokenizer
        longest = self._max_seq_length - SPECIAL_PER_PAIR
        corpus = tokenize(buffer.documents, tokenizer, longest=longest)
        dtype = token_dtype(self.vocab_size)
        blocks = [
            ExampleBatch(
                np.zeros(len(columns[1]), np.int64), *columns[1:], columns[0].astype(dtype)
            )
            for columns in make_examples(
                corpus,
                tokenizer,
                objective=self._objective,
                documents=self._documents,
                max_seq_length=self._max_seq_length,
                short_seq_prob=self._short_seq_prob,
                seed=f"{self._pair_seed}, {epoch}, {self._rank}, {buffer.number}",
            )
        ]
        examples = ExampleBatch.concatenate([ExampleBatch.empty(dtype), *blocks])
        if self._buffer > 1:
            key = (self._seed, epoch, self._rank, buffer.number)
            examples = examples[shuffle_by_key(np.arange(len(examples)), *key)]
        return buffer, examples
