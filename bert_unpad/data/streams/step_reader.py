"""Reads one rank's share of each step from its stream, in a background thread, for an exchange."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from bert_unpad.data.prefetch import Prefetcher
from bert_unpad.data.store.example_batch import ExampleBatch
from bert_unpad.data.streams.stream import ExampleStream, token_dtype

OK, FAILED, LATE, STOPPING = range(4)
"""How reading went."""
WAIT_SLICE = 0.25
"""Seconds between two looks at whether reading was stopped meanwhile."""
_READ_AHEAD = 2  # full steps that wait


class StepReader:
    """The shares of a rank's steps, epoch after epoch.

    Args:
        stream: this rank's.
        epoch: where to begin.
        start: examples of that epoch to skip.
        part: examples of the smallest step.
        parts: of a full step.
        timeout: seconds that the stream may take for a step.
        stopped: whether to stop waiting.
    """

    def __init__(
        self,
        stream: ExampleStream,
        epoch: int,
        start: int,
        part: int,
        parts: int,
        timeout: float,
        stopped: Callable[[], bool],
    ) -> None:
        self.nothing = ExampleBatch.empty(token_dtype(stream.vocab_size), stream.has_masks)
        self._stream, self._part = stream, part
        self._timeout, self._stopped = timeout, stopped
        self._ended = False  # whether this rank's part of the epoch has ended
        self._parts = Prefetcher(
            lambda batch, _: batch, self._read(epoch, start), depth=_READ_AHEAD * parts
        )

    def _read(self, epoch: int, start: int) -> Iterator[ExampleBatch]:
        """Parts of steps; one without examples at an epoch's end."""
        while True:
            for batch in self._stream.batches(epoch, start, self._part):
                yield replace(batch, tokens=batch.tokens.astype(self.nothing.tokens.dtype))
            yield self.nothing
            epoch, start = epoch + 1, 0

    def take(self, parts: int) -> tuple[int, ExampleBatch, BaseException | None]:
        """How reading went, and a share of so many parts: fewer where its epoch ends.

        After the end it has no examples until `begin_epoch`.
        """
        taken = [self.nothing]
        deadline = time.monotonic() + self._timeout
        while not self._stopped():
            if self._ended or len(taken) > parts:
                return OK, ExampleBatch.concatenate(taken), None
            left = deadline - time.monotonic()
            try:
                batch = self._parts.next_within(max(min(WAIT_SLICE, left), 0.0))
            except TimeoutError as error:
                # The reader itself may have raised this one: then its thread has ended.
                if self._parts.ended:
                    return FAILED, self.nothing, error
                if left <= WAIT_SLICE:
                    return LATE, self.nothing, error
            except BaseException as error:
                return FAILED, self.nothing, error
            else:
                self._ended = not len(batch)
                taken.append(batch)
        return STOPPING, self.nothing, None

    def begin_epoch(self) -> None:
        """Goes on with the next epoch, once all ranks have come to the end of this one."""
        self._ended = False

    def close(self, seconds: float) -> None:
        """Stops reading; waits for the thread for this many seconds at most."""
        self._parts.close(seconds)
