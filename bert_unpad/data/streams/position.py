"""The position of all ranks in their streams, which a checkpoint saves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bert_unpad.data.streams.stream import ExampleStream

_VERSION = 1


@dataclass(frozen=True)
class StreamPosition:
    """How many examples of an epoch each rank has used."""

    epoch: int
    positions: list[int]
    """Examples that each rank has used since the number of ranks last changed in this epoch."""
    past: list[list[int]]
    """Examples that each rank had used at each change of the number of ranks in this epoch."""

    @classmethod
    def begin(cls, epoch: int, num_ranks: int) -> StreamPosition:
        """Returns the beginning of an epoch."""
        return cls(epoch, [0] * num_ranks, [])

    @classmethod
    def load(
        cls, state: Mapping[str, Any], stream: ExampleStream, num_ranks: int
    ) -> StreamPosition:
        """Reads the result of `state` and prepares the stream to continue from it.

        If it was saved with another number of ranks, the rest of the epoch is divided again.

        Raises:
            ValueError: the state is damaged or from another stream, or the stream cannot continue
                with another number of ranks.
        """
        try:
            version, epoch = int(state["version"]), int(state["epoch"])
            positions = [int(n) for n in state["positions"]]
            past = [[int(n) for n in entry] for entry in state["past"]]
            identity = dict(state["stream"])
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise ValueError(f"state: not a state of ExampleExchange ({error!r})") from error
        if version != _VERSION:
            raise ValueError(f"state: expected version {_VERSION}, got {version}")
        entries = [positions, *past]
        counts = [epoch, *(n for entry in entries for n in entry)]
        if not all(entries) or not all(0 <= n < 2**62 for n in counts):
            raise ValueError("state: expected an epoch and positions of 0 to 2**62 - 1")
        if identity != stream.identity():
            raise ValueError(
                f"state: saved with another stream: {identity}, this one is {stream.identity()}"
            )
        if len(positions) != num_ranks:
            past = [*past, positions] if any(positions) else past
            positions = [0] * num_ranks
        if past:
            stream.continue_after(epoch, past)
        return cls(epoch, positions, past)

    def state(self, identity: dict[str, Any]) -> dict[str, Any]:
        """Returns the position as JSON values, with the stream's identity."""
        return {
            "version": _VERSION,
            "epoch": self.epoch,
            "positions": self.positions,
            "past": self.past,
            "stream": identity,
        }

    def moved(self, positions: list[int]) -> StreamPosition:
        """Returns a later position in the same epoch."""
        return StreamPosition(self.epoch, positions, self.past)
