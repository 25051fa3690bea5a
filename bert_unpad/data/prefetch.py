"""Collates batches in a background thread, ahead of the training loop that consumes them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

Collated = TypeVar("Collated")


class _Channel(Generic[Collated]):
    """The state that thread and consumer share, so that the thread does not hold the Prefetcher.

    A Prefetcher that is dropped without `close()` can then be collected, which ends the thread.
    """

    def __init__(self, depth: int) -> None:
        self.ready = queue.SimpleQueue[tuple[Collated | None, Any, BaseException | None]]()
        self.room = threading.Semaphore(depth)
        self.closed = False


class Prefetcher(Iterator[Collated]):
    """Collates batches in a background thread, up to `depth` ahead of the consumer.

    Args:
        collator: called with (an element of `batches`, epoch), for example a `PackedCollator`.
        batches: the collator's arguments, for example a sampler's arrays of example indices;
            iterated in the thread.
        epoch: number of the pass over the data, for the collator.
        depth: the largest number of finished batches that wait.
        pin_memory: call `pin_memory()` of the collator's results, for asynchronous copies to a GPU.
        get_state: called in the thread after each element that was taken from `batches`. The
            attribute `state` is its result for the batch that `next()` returned last. Pass a
            sampler's `state_dict` here: the sampler itself is ahead by the batches that wait.

    If the sampler or the collator fails, `next()` raises the error in place of the batch. Use this
    as a context manager, or call `close()`, to stop early.

    Raises:
        ValueError: `depth` is less than 1.
    """

    def __init__(
        self,
        collator: Callable[[Any, int], Collated],
        batches: Iterable[Any],
        *,
        epoch: int = 0,
        depth: int = 2,
        pin_memory: bool = False,
        get_state: Callable[[], Any] | None = None,
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth: expected at least 1 batch, got {depth}")
        self.state: Any = None
        self._channel: _Channel[Collated] = _Channel(depth)
        self._thread = threading.Thread(
            target=_collate_ahead,
            args=(self._channel, collator, batches, epoch, pin_memory, get_state),
            name="bert_unpad-prefetch",
            daemon=True,
        )
        self._thread.start()

    def __next__(self) -> Collated:
        return self.next_within(None)

    def next_within(self, seconds: float | None) -> Collated:
        """Returns the next batch, as `next()` does.

        Args:
            seconds: how long to wait; None waits without limit.

        Raises:
            TimeoutError: no batch arrived in time. No batch is lost; the call can be repeated.
        """
        if self._channel.closed:
            raise StopIteration
        try:
            inputs, state, error = self._channel.ready.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(f"no batch within {seconds} s") from None
        if inputs is None or error is not None:
            self.close()
            raise StopIteration if error is None else error
        self._channel.room.release()
        self.state = state
        return inputs

    @property
    def ended(self) -> bool:
        """Whether no more batches will come: it was closed, is at the end, or an error occurred."""
        return self._channel.closed

    def close(self, seconds: float | None = None) -> None:
        """Stops the thread after its current batch and drops waiting batches; may be called twice.

        Args:
            seconds: how long to wait for the thread, which ends by itself later; None waits without
                limit.
        """
        self._channel.closed = True
        self._channel.room.release()
        self._thread.join(seconds)
        self._channel.ready = queue.SimpleQueue()

    def __enter__(self) -> Prefetcher[Collated]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # It was dropped without close(): end the thread, but do not wait in a finalizer.
        channel = getattr(self, "_channel", None)
        if channel is not None:
            channel.closed = True
            channel.room.release()


def _collate_ahead(
    channel: _Channel[Collated],
    collator: Callable[[Any, int], Collated],
    batches: Iterable[Any],
    epoch: int,
    pin_memory: bool,
    get_state: Callable[[], Any] | None,
) -> None:
    try:
        iterator = iter(batches)
        while True:
            channel.room.acquire()
            if channel.closed:
                return
            indices = next(iterator, None)
            if indices is None:
                channel.ready.put((None, None, None))
                return
            state = get_state() if get_state is not None else None
            inputs: Any = collator(indices, epoch)
            channel.ready.put((inputs.pin_memory() if pin_memory else inputs, state, None))
    except BaseException as error:
        channel.ready.put((None, None, error))
