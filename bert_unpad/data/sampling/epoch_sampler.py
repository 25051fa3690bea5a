"""The base class of samplers: a position in an epoch that iterating moves and that can be saved.

A sampler has one active iterator. A second iterator, or moving the sampler, makes the first one
raise an error, because both would move the position.
"""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

_STATE_VERSION = 1


class Population(Protocol):
    """Which of all examples an epoch has, such as `bert_unpad.data.mixture.Mixture`."""

    epoch_size: int
    """Number of examples of an epoch, the same in all."""

    def identity(self) -> str:
        """Returns what a saved position depends on besides the lengths."""

    def epoch_examples(self, seed: int, epoch: int) -> NDArray[np.uint32]:
        """Returns the indices of an epoch's examples, ascending."""


class EpochSampler(ABC):
    """Yields one array of example indices per step, epoch after epoch."""

    _epoch: int

    def __init__(
        self,
        lengths: ArrayLike,
        num_replicas: int,
        rank: int,
        batch_size: int,
        seed: int,
        population: Population | None = None,
    ) -> None:
        self.lengths = as_lengths(lengths)
        _check_setup(self.lengths, num_replicas, rank, batch_size, seed)
        self.population = population
        self.rank = rank
        self.seed = seed
        self._checksum: int | None = None
        self._turn = 0  # counts moves and iterators; only the newest iterator may go on

    @property
    def epoch(self) -> int:
        """The number of the current pass over the data; grows when an iterator ends."""
        return self._epoch

    @property
    def epoch_size(self) -> int:
        """The number of examples of an epoch."""
        return len(self.lengths) if self.population is None else self.population.epoch_size

    @property
    @abstractmethod
    def steps_left(self) -> int:
        """The number of steps left in the current epoch."""

    @property
    def rows_in_step(self) -> int | None:
        """Rows, over all ranks, that the last step's sequences share; None: one row each."""
        return None

    @abstractmethod
    def set_epoch(self, epoch: int) -> None:
        """Moves to the beginning of an epoch."""

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        """Yields batches from the current position to the end of the epoch.

        Yields:
            int64 [B], indices of this rank's examples, longest first.

        Raises:
            RuntimeError: the sampler was moved, or another iterator was made, since this one.
        """
        if self.steps_left == 0:
            self.set_epoch(self._epoch + 1)
        self._turn += 1
        return self._batches(self._turn)

    @abstractmethod
    def _batches(self, turn: int) -> Iterator[NDArray[np.int64]]:
        """Yields the rest of the epoch; checks `_is_current` before each step."""

    def _is_current(self, turn: int) -> bool:
        if turn != self._turn:
            raise RuntimeError("the sampler was moved, or iterated again, while being iterated")
        return True

    def _common_state(self) -> dict[str, Any]:
        """Returns the part of a state that `_read_common` reads."""
        examples, checksum = self._data()
        return {
            "version": _STATE_VERSION,
            "seed": self.seed,
            "epoch": self._epoch,
            "num_examples": examples,
            "lengths_crc32": checksum,
        }

    def _read_common(self, state: Mapping[str, Any]) -> tuple[int, int]:
        """Returns epoch and seed of a state.

        Raises:
            ValueError: the state is damaged or from other data.
        """
        names = ("version", "epoch", "seed", "num_examples", "lengths_crc32")
        try:
            version, epoch, seed, *data = (int(state[name]) for name in names)
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise self._no_state(error) from error
        if version != _STATE_VERSION:
            raise ValueError(f"state: expected version {_STATE_VERSION}, got {version}")
        if not 0 <= epoch < 2**62 or not 0 <= seed < 2**63:
            raise ValueError(f"state: epoch or seed out of range: {epoch}, {seed}")
        if tuple(data) != self._data():
            raise ValueError(
                "state: saved with other data: (num_examples, lengths_crc32) = "
                f"{tuple(data)}, these lengths have {self._data()}"
            )
        return epoch, seed

    def _no_state(self, error: Exception) -> ValueError:
        return ValueError(f"state: not a state of {type(self).__name__} ({error!r})")

    def _data(self) -> tuple[int, int]:
        """Returns the number of examples and the CRC-32 of their lengths."""
        if self._checksum is None:
            self._checksum = lengths_checksum(self.lengths)
            if self.population is not None:
                self._checksum = zlib.crc32(self.population.identity().encode(), self._checksum)
        return len(self.lengths), self._checksum


def as_lengths(lengths: ArrayLike) -> NDArray[np.uint16]:
    """Checks lengths and gives them the balancer's type, without a copy where they have it.

    Raises:
        TypeError: the lengths are not integers.
        ValueError: they are not one-dimensional, or not all in 0 to 65,535.
    """
    array = np.asarray(lengths)
    if array.ndim != 1:
        raise ValueError(f"lengths: expected one dimension [N], got shape {list(array.shape)}")
    if array.size == 0:
        return np.empty(0, np.uint16)
    if array.dtype.kind not in "iu":
        raise TypeError(f"lengths: expected integers, got {array.dtype}")
    if array.dtype != np.uint16 and not 0 <= array.min() <= array.max() <= 65_535:
        raise ValueError(f"lengths: expected 0 to 65535 tokens, got {array.min()} to {array.max()}")
    return np.ascontiguousarray(array, np.uint16)


def lengths_checksum(lengths: NDArray[np.uint16]) -> int:
    """Returns the CRC-32 that tells whether a saved position belongs to these lengths."""
    return zlib.crc32(lengths.astype("<u2", copy=False).data)


def _check_setup(
    lengths: NDArray[np.uint16], num_replicas: int, rank: int, batch_size: int, seed: int
) -> None:
    """Raises a ValueError that names the argument unless a sampler accepts the arguments."""
    if len(lengths) == 0:
        raise ValueError("lengths: expected at least one example, got none")
    check_at_least("num_replicas", num_replicas, 1)
    check_at_least("batch_size", batch_size, 1)
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed: expected 0 to 2**63 - 1, got {seed}")
    if not 0 <= rank < num_replicas:
        raise ValueError(f"rank: expected 0 to {num_replicas - 1}, got {rank}")


def check_at_least(name: str, value: int, least: int) -> None:
    """Raises a ValueError that names the argument unless `value` is at least `least`."""
    if value < least:
        raise ValueError(f"{name}: expected {least} or more, got {value}")
