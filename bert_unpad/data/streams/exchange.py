"""Equal work without a global index: ranks read their own examples and exchange them, ahead of use.

Works in rounds, one a step, in a background thread. In a round each rank reads its share of the
step, all ranks tell each other the lengths, each of them deals the examples out by the same rule
(`_balancer.deal`) and examples travel to their new ranks. A rank that cannot take part, because its
reader has failed or is late, or because it is about to stop, says so together with its lengths, and
then all ranks drop that round. (Balancing by exchange in background threads is the method of
Baidu's MLPerf BERT submission.)
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bert_unpad._balancer import WorkModel, deal
from bert_unpad.data.sampling.balanced_sampler import efficiency
from bert_unpad.data.sampling.warmup_sampler import BatchWarmup
from bert_unpad.data.store.example_batch import ExampleBatch
from bert_unpad.data.streams.position import StreamPosition
from bert_unpad.data.streams.step_reader import FAILED, LATE, STOPPING, WAIT_SLICE, StepReader
from bert_unpad.data.streams.stream import ExampleStream
from bert_unpad.data.streams.transport import Transport

logger = logging.getLogger(__name__)

# What each rank says in a round: status, examples read, its position in the epoch after them, a
# digest of the plan before, checksums of what it has read and been given before, the bits of its
# speed; then the lengths, with the numbers of given masks in higher bits.
_FIELDS = 7
_LENGTH_BITS = 16  # lengths are uint16 everywhere
_MAX_TEXT = 4000  # characters of an error that other ranks are told


class ExchangeError(RuntimeError):
    """A rank's reader has failed or is late, or ranks do not agree; raised on all ranks.

    Attributes:
        ranks: whose fault it is; none if that is not known.
    """

    def __init__(self, message: str, ranks: list[int]) -> None:
        super().__init__(message)
        self.ranks = ranks


@dataclass(frozen=True)
class ExchangedStep:
    """What one rank gets in one step."""

    examples: ExampleBatch
    """The rank's examples, longest first."""
    epoch: int
    state: dict[str, Any]
    """Where all ranks stand after this step; the same on all of them. See `ExampleExchange`."""
    straggler_efficiency: float
    """Mean over greatest work of a rank, by the work model and the speeds if there are any."""
    seconds: float
    """Seconds from the first word to the other ranks to having the examples, waits included."""
    bytes_sent: int
    """Size of the examples that this rank has sent to others."""


class ExampleExchange(Iterator[ExchangedStep]):
    """Steps of examples from streams, epoch after epoch without end.

    Every example that some rank's stream gives is used once an epoch by one rank; a checksum over
    all ranks proves it at each epoch's end. An epoch ends when all streams have ended. In each
    group of ranks that exchanges, numbers of examples differ by one at most (not with "greedy").

    All ranks must make one with the same arguments (but for the stream) and take the same steps.
    Use it as a context manager, or call `close()` on all ranks.

    Args:
        stream: this rank's.
        batch_size: examples that each rank reads for a step.
        warmup: how the batch grows to that; None where it is full from the beginning.
        updates: steps that were taken before, for `warmup`.
        scope: how far examples travel: "none", "node" (within a node), "world", or "two_level" (as
            far as world, but within nodes first, then between them).
        dealing: "plain", "snake", "lpt" or "greedy", see `_balancer.deal`.
        work: work of a sequence by its length; by default that of BERT-large's layers.
        node_size: ranks of a node, neighbours in number; by default all ranks.
        reader_timeout: seconds that a stream may take for a step.
        timeout: seconds after which an operation fails that some rank does not join: more than any
            pause of training (a rank that has enough steps in its queue joins no further one).
        depth: finished steps that may wait.
        speed: how fast this rank is, a number > 0, where ranks differ; it may change while steps
            are taken. Ranks then get work in proportion to it ("greedy" alone can do that).
        state: go on from there: `ExchangedStep.state` of the last step trained on. With another
            number of ranks what is left of the epoch is divided again, if the stream can do that.

    Raises:
        ValueError: an argument is out of range or differs between ranks, or the state is damaged or
            of another stream.
    """

    _speed: float | None

    def __init__(
        self,
        stream: ExampleStream,
        *,
        batch_size: int,
        warmup: BatchWarmup | None = None,
        updates: int = 0,
        scope: str = "world",
        dealing: str = "lpt",
        work: WorkModel | None = None,
        node_size: int | None = None,
        reader_timeout: float = 120.0,
        timeout: float = 1800.0,
        depth: int = 1,
        speed: float | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size: expected 1 or more, got {batch_size}")
        if warmup is not None and batch_size % warmup.full:
            raise ValueError(
                f"batch_size: expected a multiple of the {warmup.full} parts of warmup, got "
                f"{batch_size}"
            )
        if depth < 1:
            raise ValueError(f"depth: expected 1 or more, got {depth}")
        if not reader_timeout > 0:
            raise ValueError(f"reader_timeout: expected more than 0 s, got {reader_timeout}")
        self._stream = stream
        self._batch_size = batch_size
        self._warmup = BatchWarmup(1, 1) if warmup is None else warmup
        self._updates = updates
        self._dealing = dealing
        self._work = WorkModel.for_hidden() if work is None else work
        self._reader_timeout = reader_timeout
        self.speed = speed
        lengths, counts = np.empty(0, np.uint16), np.zeros(1, np.int64)
        deal(lengths, counts, dealing=dealing, group_ranks=1, work=self._work)  # checks `dealing`
        self._transport = Transport(scope, node_size, timeout)
        self.rank, self.num_ranks = self._transport.rank, self._transport.num_ranks
        self._identity = stream.identity()
        self._position = StreamPosition.begin(0, self.num_ranks)
        try:
            self._agree(scope, state)  # so that loading fails on all ranks or on none
            if state is not None:
                self._position = StreamPosition.load(state, stream, self.num_ranks)
        except BaseException:
            self._transport.close()
            raise
        self._plan_digest = 0
        self._sums = np.zeros(2, np.uint64)  # of what this rank has read, and of what it was given
        self._in_epoch = sum(map(sum, [self._position.positions, *self._position.past]))
        self._closed = False
        self._ready = queue.SimpleQueue[ExchangedStep | BaseException | None]()
        self._room = threading.Semaphore(depth)
        self._reader = StepReader(
            stream,
            self._position.epoch,
            self._position.positions[self.rank],
            batch_size // self._warmup.full,
            self._warmup.full,
            reader_timeout,
            lambda: self._closed,
        )
        self._thread = threading.Thread(target=self._run, name="bert_unpad-exchange", daemon=True)
        self._thread.start()

    def _agree(self, scope: str, state: Mapping[str, Any] | None) -> None:
        mine = {
            "batch_size": self._batch_size,
            "warmup": self._warmup,
            "updates": self._updates,
            "scope": scope,
            "dealing": self._dealing,
            "work": (self._work.linear, self._work.quadratic),
            "node_size": self._transport.node_size,
            "speed is None": self.speed is None,
            "stream.vocab_size": self._stream.vocab_size,
            "stream.has_masks": self._stream.has_masks,
            "stream.identity()": self._identity,
            "state": state,
        }
        for rank, theirs in enumerate(self._transport.share_object(mine)):
            for name, value in mine.items():
                if theirs[name] != value:
                    raise ValueError(
                        f"{name}: expected the same on all ranks, got {value} on rank {self.rank} "
                        f"and {theirs[name]} on rank {rank}"
                    )

    @property
    def speed(self) -> float | None:
        """How fast this rank is; counts from the next round on."""
        return self._speed

    @speed.setter
    def speed(self, speed: float | None) -> None:
        if hasattr(self, "_speed") and (speed is None) != (self._speed is None):
            raise ValueError(
                f"speed: expected None, or numbers, from the beginning on, got {speed}"
            )
        if speed is not None:
            if not 0 < speed < math.inf:
                raise ValueError(f"speed: expected a finite number > 0, got {speed}")
            if self._dealing != "greedy":
                raise ValueError(f"speed: expected none with dealing {self._dealing}, got {speed}")
        self._speed = speed

    def __next__(self) -> ExchangedStep:
        """The next step; waits for it.

        Raises:
            ExchangeError: some rank's reader has failed or is late.
            StopIteration: the exchange was closed.
        """
        item = self._ready.get()
        if item is None or isinstance(item, BaseException):
            self._ready.put(None)
            raise StopIteration if item is None else item
        self._room.release()
        return item

    def close(self, seconds: float = 10.0) -> None:
        """Stops on this rank, and on the others once they have used up what waits there.

        Returns when all ranks have agreed to stop, or have failed; after this many seconds the
        groups are torn down instead. May be called twice, and while another thread waits in
        `next()`.
        """
        self._closed = True
        self._room.release()
        self._thread.join(seconds)
        if self._thread.is_alive():
            logger.warning(
                "rank %d: some rank has not stopped exchanging examples within %g s",
                *(self.rank, seconds),
            )
            self._transport.abort()
        else:
            self._transport.close()
        self._reader.close(WAIT_SLICE)
        self._ready.put(None)

    def __enter__(self) -> ExampleExchange:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        """The thread: rounds until something ends them."""
        try:
            while True:
                self._room.acquire()
                step = None
                while step is None:  # more than once where an epoch ends
                    step = self._round(*self._reader.take(self._warmup.parts(self._updates)))
                self._updates += 1
                self._ready.put(step)
        except _Stopped:
            self._ready.put(None)
        except ExchangeError as error:
            self._ready.put(error)
        except BaseException as error:
            broken = ExchangeError(
                f"rank {self.rank}: the exchange of examples broke down "
                f"{self._where()}: {type(error).__name__}: {error}",
                [],
            )
            broken.__cause__ = error
            self._ready.put(broken)

    def _round(
        self, status: int, batch: ExampleBatch, error: BaseException | None
    ) -> ExchangedStep | None:
        """One step, on all ranks; None if all ranks have come to the epoch's end.

        Raises:
            _Stopped: this rank wants to stop, and it or another one has said so.
            ExchangeError: something is wrong, or another rank wants to stop.
        """
        started = time.perf_counter()
        row = np.zeros(_FIELDS + self._batch_size, np.int64)
        position = self._position.positions[self.rank] + len(batch)
        own_speed = self.speed  # another thread may change it
        sums, speed = self._sums.view(np.int64), np.float64(own_speed or 0.0).view(np.int64)
        row[:_FIELDS] = status, len(batch), position, self._plan_digest, *sums, speed
        row[_FIELDS : _FIELDS + len(batch)] = batch.lengths
        if batch.masks is not None:
            row[_FIELDS : _FIELDS + len(batch)] |= batch.masks.counts << _LENGTH_BITS
        rows = self._transport.share(row)
        self._check(rows, error)
        counts = np.ascontiguousarray(rows[:, 1])
        sizes = rows[:, _FIELDS:][np.arange(self._batch_size) < counts[:, None]]
        lengths = sizes & ((1 << _LENGTH_BITS) - 1)
        mask_counts = sizes >> _LENGTH_BITS if self._stream.has_masks else None
        if not len(lengths):
            self._end_epoch(rows)
            self._reader.begin_epoch()
            return None
        speeds = None
        if own_speed is not None:
            speeds = np.ascontiguousarray(rows[:, 6]).view(np.float64)
        holders = np.repeat(np.arange(self.num_ranks), counts)
        receivers = deal(
            lengths.astype(np.uint16),
            counts,
            dealing=self._dealing,
            group_ranks=self._transport.group_ranks,
            work=self._work,
            speeds=speeds,
        )
        self._plan_digest = zlib.crc32(receivers.astype("<i8", copy=False).data)
        sent = self._transport.bytes_sent
        examples = self._transport.exchange(batch, lengths, holders, receivers, mask_counts)
        seconds = time.perf_counter() - started
        self._position = self._position.moved(rows[:, 2].tolist())
        self._in_epoch += len(lengths)
        self._sums += np.array([batch.checksum(), examples.checksum()])
        linear, quadratic = self._work.linear, self._work.quadratic
        work: NDArray[Any] = np.bincount(
            receivers, lengths * (linear + quadratic * lengths), minlength=self.num_ranks
        )
        times = work if speeds is None else work / speeds
        return ExchangedStep(
            examples.longest_first(),
            self._position.epoch,
            self._position.state(self._identity),
            float(efficiency(times[None])[0]),
            seconds,
            self._transport.bytes_sent - sent,
        )

    def _where(self) -> str:
        return f"in epoch {self._position.epoch}, after {self._in_epoch} examples of all ranks"

    def _check(self, rows: NDArray[np.int64], error: BaseException | None) -> None:
        """Ends the round on all ranks if any rank has reported a problem."""
        statuses, digests = rows[:, 0], rows[:, 3]
        faulty = np.flatnonzero((statuses == FAILED) | (statuses == LATE)).tolist()
        if faulty:
            text = "" if error is None else f"{type(error).__name__}: {error}"[:_MAX_TEXT]
            texts = self._transport.share_object(text)
            reasons = [
                f"rank {rank}: its reader failed: {texts[rank]}"
                if statuses[rank] == FAILED
                else f"rank {rank}: its reader gave no examples for {self._reader_timeout:g} s "
                "(reader_timeout)"
                for rank in faulty
            ]
            raise ExchangeError(f"{'; '.join(reasons)} ({self._where()})", faulty) from error
        stopping = np.flatnonzero(statuses == STOPPING).tolist()
        if stopping and self._closed:
            raise _Stopped
        if stopping:
            raise ExchangeError(
                f"ranks {stopping} have stopped exchanging examples ({self._where()})", stopping
            )
        differing = np.flatnonzero(digests != digests[0]).tolist()
        if differing:
            raise ExchangeError(
                f"ranks {differing} have dealt the examples of the last step out otherwise than "
                f"rank 0 ({self._where()})",
                differing,
            )

    def _end_epoch(self, rows: NDArray[np.int64]) -> None:
        read, given = rows[:, 4:6].view(np.uint64).sum(axis=0)
        if read != given:
            raise ExchangeError(
                f"examples were lost, repeated or altered between ranks ({self._where()})",
                list(range(self.num_ranks)),
            )
        if not self._in_epoch:
            raise ExchangeError(
                f"no rank's stream gave an example in epoch {self._position.epoch}",
                list(range(self.num_ranks)),
            )
        self._position = StreamPosition.begin(self._position.epoch + 1, self.num_ranks)
        self._in_epoch = 0


class _Stopped(Exception):
    """A rank has told the others that it stops, and this one was to stop as well."""
