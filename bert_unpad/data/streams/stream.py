"""Sources without a global index: each rank reads examples of its own, in an order of their own.

A stream can be opened at any position of an epoch, which is all that exact resuming takes: what was
read ahead but not trained on is simply read again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bert_unpad.data.random_hash import splitmix64
from bert_unpad.data.sampling.epoch_sampler import lengths_checksum
from bert_unpad.data.store.dataset import ExampleDataset
from bert_unpad.data.store.example_batch import ExampleBatch
from bert_unpad.data.store.shards import MAX_LENGTH, Example


class ExampleStream(Protocol):
    """What one rank reads. Examples are repeatable: the same epoch gives the same ones again."""

    vocab_size: int
    """Number of token ids, the same on all ranks."""
    has_masks: bool
    """Whether the examples bring their masks, the same on all ranks."""

    def batches(self, epoch: int, start: int, batch_size: int) -> Iterator[ExampleBatch]:
        """This rank's examples of an epoch, from the `start`-th on.

        Yields:
            `batch_size` examples at a time, the last time perhaps fewer; then ends.
        """

    def identity(self) -> dict[str, Any]:
        """What a saved position is valid for, the same on all ranks; JSON values."""

    def continue_after(self, epoch: int, past: Sequence[Sequence[int]]) -> None:
        """In this epoch only, read what is left after other numbers of ranks have read some of it.

        Args:
            epoch: the epoch.
            past: for each time that the ranks changed, how many examples each had used.

        Raises:
            ValueError: this stream cannot do that.
        """


def token_dtype(vocab_size: int) -> np.dtype:
    """The narrowest type that tokens travel in."""
    return np.dtype(np.uint16 if vocab_size <= 65_536 else np.uint32)


def check_rank(rank: int, num_ranks: int) -> None:
    """Raises ValueError unless `rank` is 0 to num_ranks - 1."""
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank: expected 0 to {num_ranks - 1}, got {rank}")


def refuse_other_ranks(epoch: int, past: Sequence[Sequence[int]], num_ranks: int) -> None:
    """`ExampleStream.continue_after` of a stream that no other number of ranks can divide.

    Raises:
        ValueError: something has been read in the epoch.
    """
    if any(any(positions) for positions in past):
        raise ValueError(
            f"state: saved with {len(past[-1])} ranks in the middle of epoch {epoch}; such a "
            f"stream goes on with as many ranks only, not with {num_ranks}"
        )


class ShardStream:
    """One rank's contiguous part of a data set, read in order through a shuffle buffer.

    The buffer is filled, shuffled and emptied as a whole, so that a position can be found again by
    refilling one buffer. Every example is in one rank's part; parts differ by one example at most.

    Args:
        dataset: the examples; ids are places in it, so masks are those of an index-based sampler.
        rank: this one, 0 to num_ranks - 1.
        num_ranks: how many share the data set.
        seed: of the shuffling; all ranks must give the same.
        shuffle_buffer: examples; 1 keeps the data set's order.

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
        return {
            "seed": self._seed,
            "shuffle_buffer": self._buffer,
            "num_examples": len(self.dataset),
            "lengths_crc32": lengths_checksum(self.dataset.lengths),
        }

    def continue_after(self, epoch: int, past: Sequence[Sequence[int]]) -> None:
        """See `ExampleStream`; costs 8 bytes for each example that is left."""
        self._past_epoch = epoch
        self._past = tuple(tuple(positions) for positions in past)

    def part_sizes(self, epoch: int) -> list[int]:
        """How many examples each rank has to read in an epoch."""
        parts = _parts(self._population(epoch), self._num_ranks)
        return [len(part) for part in parts]

    def batches(self, epoch: int, start: int, batch_size: int) -> Iterator[ExampleBatch]:
        """See `ExampleStream`."""
        segment = len(self._past) if epoch == self._past_epoch else 0
        part = _parts(self._population(epoch), self._num_ranks)[self._rank]
        left = np.empty(0, np.int64)
        for indices in self._shuffled(part, epoch, segment, self._rank, start):
            left = np.concatenate([left, indices])
            full = len(left) // batch_size * batch_size
            for first in range(0, full, batch_size):
                yield self.dataset.batch(left[first : first + batch_size])
            left = left[full:]
        if len(left):
            yield self.dataset.batch(left)

    def _population(self, epoch: int) -> NDArray[np.int64] | range:
        """The examples that the ranks of now share in this epoch, ascending."""
        population: NDArray[np.int64] | range = range(len(self.dataset))
        if epoch == self._past_epoch:
            for segment, positions in enumerate(self._past):
                parts = _parts(population, len(positions))
                rest = [
                    indices
                    for rank, (part, start) in enumerate(zip(parts, positions, strict=True))
                    for indices in self._shuffled(part, epoch, segment, rank, start)
                ]
                population = np.sort(np.concatenate([np.empty(0, np.int64), *rest]))
        return population

    def _shuffled(
        self, part: NDArray[np.int64] | range, epoch: int, segment: int, rank: int, start: int
    ) -> Iterator[NDArray[np.int64]]:
        """A rank's examples from the `start`-th on, a buffer at a time."""
        for number in range(start // self._buffer, -(-len(part) // self._buffer)):
            first = number * self._buffer
            indices = np.asarray(part[first : first + self._buffer], np.int64)
            if self._buffer > 1:
                indices = shuffle_by_key(indices, self._seed, epoch, segment, rank, number)
            yield indices[max(start - first, 0) :]


class IterableStream:
    """Any iterable of examples as one rank's stream.

    Resuming skips the examples that were used, so it takes as long as iterating over them; a source
    that can seek should be an `ExampleStream` itself. A change of the number of ranks in the middle
    of an epoch is refused: nobody could say who has read what.

    Args:
        make: called with the epoch's number; gives this rank's examples of that epoch, the same
            ones in the same order whenever it is asked. It should shuffle them if need be.
        rank: this one.
        num_ranks: all; the examples' ids are their positions * num_ranks + rank.
        vocab_size: number of token ids.
        name: of the source, to tell a position saved for another one.
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
        """Raises ValueError unless nothing has been read in the epoch so far."""
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


def _parts(
    population: NDArray[np.int64] | range, num_ranks: int
) -> list[NDArray[np.int64] | range]:
    ends = [len(population) * rank // num_ranks for rank in range(num_ranks + 1)]
    return [population[first:last] for first, last in itertools.pairwise(ends)]


def shuffle_by_key(indices: NDArray[np.int64], *key: int) -> NDArray[np.int64]:
    """Distinct indices in an order drawn from the key; unlike numpy's, the same in all versions."""
    state = np.zeros(1, np.uint64)
    for word in key:
        state = splitmix64(state + np.uint64(word))
    return indices[np.argsort(splitmix64(state + indices.astype(np.uint64)))]
