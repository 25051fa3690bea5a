"""Sources without a global index: each rank reads its own examples in its own order.

A stream can be opened at any position of an epoch. Exact resuming needs no more: examples that were
read ahead but not trained on are read again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bert_unpad.data.mixture import Mixture
from bert_unpad.data.random_hash import splitmix64
from bert_unpad.data.sampling.epoch_sampler import lengths_checksum
from bert_unpad.data.store.dataset import ExampleDataset
from bert_unpad.data.store.example_batch import ExampleBatch
from bert_unpad.data.store.shards import MAX_LENGTH, Example


class ExampleStream(Protocol):
    """The examples of one rank; the same epoch gives the same examples again."""

    vocab_size: int
    """The number of token ids, the same on all ranks."""
    has_masks: bool
    """Whether the examples come with masks, the same on all ranks."""

    def batches(self, epoch: int, start: int, batch_size: int) -> Iterator[ExampleBatch]:
        """Yields this rank's examples of an epoch, from the `start`-th on.

        Yields:
            Batches of `batch_size` examples; the last one may have fewer.
        """

    def identity(self) -> dict[str, Any]:
        """Returns what a saved position depends on, as JSON values; the same on all ranks."""

    def continue_after(self, epoch: int, past: Sequence[Sequence[int]]) -> None:
        """Reads, in this epoch only, what other numbers of ranks have left of it.

        Args:
            epoch: the epoch.
            past: for each change of the number of ranks, how many examples each rank had used.

        Raises:
            ValueError: this stream cannot do that.
        """


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the narrowest dtype in which tokens are sent."""
    return np.dtype(np.uint16 if vocab_size <= 65_536 else np.uint32)


def check_rank(rank: int, num_ranks: int) -> None:
    """Raises a ValueError unless `rank` is 0 to num_ranks - 1."""
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank: expected 0 to {num_ranks - 1}, got {rank}")


def refuse_other_ranks(epoch: int, past: Sequence[Sequence[int]], num_ranks: int) -> None:
    """Implements `ExampleStream.continue_after` for streams that need the same number of ranks.

    Raises:
        ValueError: something of the epoch has been read.
    """
    if any(any(positions) for positions in past):
        raise ValueError(
            f"state: expected {len(past[-1])} ranks, as when it was saved in the middle of epoch "
            f"{epoch}, got {num_ranks}; this stream cannot continue with another number"
        )


_CHUNKS = 16
"""Places of the data set that a full shuffle buffer comes from."""


class ShardStream:
    """One rank's part of a data set, read in chunks of neighbours through a shuffle buffer.

    Chunks come in another random order in every epoch, so the beginning of an epoch has examples of
    the whole data set, whatever the order of its files. The buffer is filled, shuffled and emptied
    as a whole, so that resuming only has to refill one buffer. Every example is in one rank's part.
    Sizes of parts differ by at most one example.

    Args:
        dataset: the examples; their ids are indices, so masks are those of an index-based sampler.
        rank: this rank, 0 to num_ranks - 1.
        num_ranks: number of ranks that share the data set.
        seed: seed of the shuffling, the same on all ranks.
        shuffle_buffer: number of examples in the buffer, 16 chunks; 1 keeps the data set's order.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        dataset: ExampleDataset,
        rank: int,
        num_ranks: int,
        *,
        seed: int = 0,
        shuffle_buffer: int = 8192,
    ) -> None:
        check_rank(rank, num_ranks)
        if shuffle_buffer < 1:
            raise ValueError(f"shuffle_buffer: expected 1 or more, got {shuffle_buffer}")
        self.dataset = dataset
        self.vocab_size = dataset.vocab_size
        self.has_masks = dataset.has_masks
        self._rank = rank
        self._num_ranks = num_ranks
        self._seed = seed
        self._buffer = shuffle_buffer
        self._past_epoch = -1
        self._past: tuple[tuple[int, ...], ...] = ()

    def identity(self) -> dict[str, Any]:
        """See `ExampleStream`."""
        identity: dict[str, Any] = {
            "version": 2,  # of the order
            "seed": self._seed,
            "shuffle_buffer": self._buffer,
            "num_examples": len(self.dataset),
            "lengths_crc32": lengths_checksum(self.dataset.lengths),
        }
        if isinstance(self.dataset, Mixture):
            identity["mixture"] = self.dataset.identity()
        return identity

    def continue_after(self, epoch: int, past: Sequence[Sequence[int]]) -> None:
        """See `ExampleStream`; takes 8 bytes of memory per example that is left."""
        self._past_epoch = epoch
        self._past = tuple(tuple(positions) for positions in past)

    def part_sizes(self, epoch: int) -> list[int]:
        """Returns how many examples each rank reads in an epoch."""
        return np.diff(_bounds(len(self._population(epoch)), self._num_ranks)).tolist()

    def batches(self, epoch: int, start: int, batch_size: int) -> Iterator[ExampleBatch]:
        """See `ExampleStream`."""
        segment = len(self._past) if epoch == self._past_epoch else 0
        chunks = self._chunks(self._population(epoch), epoch, segment)
        left = np.empty(0, np.int64)
        for indices in self._shuffled(chunks, self._num_ranks, self._rank, start):
            left = np.concatenate([left, indices])
            full = len(left) // batch_size * batch_size
            for first in range(0, full, batch_size):
                yield self.dataset.batch(left[first : first + batch_size])
            left = left[full:]
        if len(left):
            yield self.dataset.batch(left)

    def _population(self, epoch: int) -> NDArray[np.int64] | range:
        """Returns the indices that the current ranks share in this epoch.

        They ascend; those of a mixture are in random order, so that each chunk has its share of
        every source.
        """
        population: NDArray[np.int64] | range = range(len(self.dataset))
        mixed = isinstance(self.dataset, Mixture)
        if isinstance(self.dataset, Mixture):
            chosen = self.dataset.epoch_examples(self._seed, epoch).astype(np.int64)
            population = shuffle_by_key(chosen, self._seed, epoch)
        if epoch == self._past_epoch:
            for segment, positions in enumerate(self._past):
                chunks = self._chunks(population, epoch, segment)
                rest = [
                    indices
                    for rank, start in enumerate(positions)
                    for indices in self._shuffled(chunks, len(positions), rank, start)
                ]
                population = np.sort(np.concatenate([np.empty(0, np.int64), *rest]))
                if mixed:
                    population = shuffle_by_key(population, self._seed, epoch, segment)
        return population

    def _chunks(self, population: NDArray[np.int64] | range, epoch: int, segment: int) -> _Chunks:
        size = max(self._buffer // _CHUNKS, 1) if self._buffer > 1 else max(len(population), 1)
        return _Chunks(population, size, (self._seed, epoch, segment))

    def _shuffled(
        self, chunks: _Chunks, num_ranks: int, rank: int, start: int
    ) -> Iterator[NDArray[np.int64]]:
        """Yields the indices of a rank's examples from the `start`-th on, one buffer at a time."""
        begin, end = _bounds(chunks.size, num_ranks)[rank : rank + 2]
        for number in range(start // self._buffer, -(-(end - begin) // self._buffer)):
            first = number * self._buffer
            indices = chunks[begin + first : min(begin + first + self._buffer, end)]
            if self._buffer > 1:
                indices = shuffle_by_key(indices, *chunks.key, rank, number)
            yield indices[max(start - first, 0) :]


class IterableStream:
    """Any iterable of examples as one rank's stream.

    Resuming iterates over the examples that were used; a source that can seek should implement
    `ExampleStream` itself. The number of ranks must not change in the middle of an epoch, because
    it is unknown which examples the other ranks have read.

    Args:
        make: called with the number of an epoch; returns this rank's examples of that epoch, in
            every call the same in the same order. It should shuffle them if that is needed.
        rank: this rank.
        num_ranks: number of ranks; an example's id is its position * num_ranks + rank.
        vocab_size: number of token ids.
        name: name of the source; a position saved with another name is refused.
    """

    has_masks = False

    def __init__(
        self,
        make: Callable[[int], Iterable[Example]],
        rank: int,
        num_ranks: int,
        *,
        vocab_size: int,
        name: str = "",
    ) -> None:
        check_rank(rank, num_ranks)
        self.vocab_size = vocab_size
        self._make = make
        self._rank = rank
        self._num_ranks = num_ranks
        self._name = name

    def identity(self) -> dict[str, Any]:
        """See `ExampleStream`."""
        return {"name": self._name, "vocab_size": self.vocab_size}

    def continue_after(self, epoch: int, past: Sequence[Sequence[int]]) -> None:
        """Raises a ValueError if anything of the epoch has been read."""
        refuse_other_ranks(epoch, past, self._num_ranks)

    def batches(self, epoch: int, start: int, batch_size: int) -> Iterator[ExampleBatch]:
        """See `ExampleStream`.

        Raises:
            ValueError: an example is empty, too long or has tokens outside the vocabulary.
        """
        examples = itertools.islice(self._make(epoch), start, None)
        while chunk := list(itertools.islice(examples, batch_size)):
            yield self._columns(chunk, start)
            start += len(chunk)

    def _columns(self, examples: list[Example], start: int) -> ExampleBatch:
        for number, example in enumerate(examples, start):
            tokens = np.asarray(example.input_ids)
            if (
                tokens.ndim != 1
                or tokens.dtype.kind not in "iu"
                or not 1 <= len(tokens) <= MAX_LENGTH
                or not 0 <= tokens.min() <= tokens.max() < self.vocab_size
                or not 0 <= example.second_start <= len(tokens)
                or example.next_sentence_label not in (0, 1, -100)
            ):
                raise ValueError(
                    f"example {number} of rank {self._rank}: expected 1 to {MAX_LENGTH:,} "
                    f"input_ids of 0 to {self.vocab_size - 1}, second_start of 0 to their number "
                    "and a next_sentence_label of 0, 1 or -100"
                )
        positions = np.arange(start, start + len(examples))
        return ExampleBatch(
            positions * self._num_ranks + self._rank,
            np.array([len(example.input_ids) for example in examples], np.int64),
            np.array([example.second_start for example in examples], np.int64),
            np.array([example.next_sentence_label for example in examples], np.int64),
            np.concatenate([example.input_ids for example in examples]).astype(
                token_dtype(self.vocab_size)
            ),
        )


class _Chunks:
    """Indices in chunks of neighbours, the chunks in random order; one after another by slices."""

    def __init__(
        self, population: NDArray[np.int64] | range, chunk: int, key: tuple[int, ...]
    ) -> None:
        self.size, self.key = len(population), key
        self._population = population
        begins = shuffle_by_key(np.arange(0, self.size, chunk), *key)
        sizes = np.minimum(chunk, self.size - begins)
        self._ends = np.cumsum(sizes)
        self._shifts = begins - (self._ends - sizes)  # from places in this order to those before

    def __getitem__(self, window: slice) -> NDArray[np.int64]:
        at = np.arange(window.start, window.stop)
        places = at + self._shifts[np.searchsorted(self._ends, at, side="right")]
        return places if isinstance(self._population, range) else self._population[places]


def _bounds(size: int, num_ranks: int) -> list[int]:
    """Where each rank's part of so many examples begins, and where the last one ends."""
    return [size * rank // num_ranks for rank in range(num_ranks + 1)]


def shuffle_by_key(indices: NDArray[np.int64], *key: int) -> NDArray[np.int64]:
    """Shuffles distinct indices by a key; unlike numpy's shuffle, the same in all versions."""
    state = np.zeros(1, np.uint64)
    for word in key:
        state = splitmix64(state + np.uint64(word))
    return indices[np.argsort(splitmix64(state + indices.astype(np.uint64)))]
