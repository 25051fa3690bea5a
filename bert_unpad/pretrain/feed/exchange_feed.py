"""Feeds the training loop from streams: each rank reads its own part, ranks exchange examples.

Stands in for the sampler and `endless_steps` where there is no index of lengths. Four threads work
one after another, with a bounded queue between each two: reading, exchanging, collating, training.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bert_unpad._balancer import WorkModel
from bert_unpad.batch.graph_shapes import GraphShapes
from bert_unpad.data import ExampleBatch, PackedCollator, Prefetcher, pack_examples
from bert_unpad.data.streams.exchange import ExampleExchange, ExchangedStep
from bert_unpad.data.streams.position import StreamPosition
from bert_unpad.data.streams.stream import ShardStream
from bert_unpad.data.streams.text_stream import TextStream
from bert_unpad.pretrain.config import BatchingConfig
from bert_unpad.pretrain.feed.rank_speeds import RankSpeeds
from bert_unpad.pretrain.feed.steps import FeedState, Step, StepCollator
from bert_unpad.pretrain.node_groups import common_node_size
from bert_unpad.pretrain.ranks import Ranks

# Seconds that a rank waits for the others to stop too. All stop after the same step, so at most one
# step lies between them; where one has failed, no other rank may be left.
_STOP_SECONDS = 60.0
_STOP_SECONDS_AFTER_ERROR = 2.0


class ExchangedFeed:
    """Steps of examples that all ranks read, each its own part, and balance by exchange.

    Args:
        stream: this rank's examples.
        ranks: the processes of the run.
        batching: how examples become steps, and how far they travel.
        work: work of a sequence by its length.
        speeds: of the ranks; None where all are alike.
        updates: made already, for a batch that still grows.

    Raises:
        ConfigError: machines have different numbers of processes, and batching.scope is by machine,
            or the batch does not fit the number of ranks.
    """

    def __init__(
        self,
        stream: ShardStream | TextStream,
        ranks: Ranks,
        batching: BatchingConfig,
        work: WorkModel,
        speeds: RankSpeeds | None = None,
        updates: int = 0,
    ) -> None:
        self._ranks = ranks
        self._batching = batching
        self._batch_size = batching.per_rank(ranks.world_size)
        self._warmup, self._updates = batching.warmup(ranks.world_size), updates
        self._work = work
        self._stream = stream
        self._speed = None if speeds is None else float(speeds.values[ranks.rank])
        self._exchange: ExampleExchange | None = None
        self._position = StreamPosition.begin(0, ranks.world_size)
        self._node_size = self._common_node_size()

    def _common_node_size(self) -> int | None:
        """Ranks per machine; None where machines do not matter."""
        scope = self._batching.scope
        if self._ranks.world_size == 1 or scope not in ("node", "two_level"):
            return None
        return common_node_size(self._ranks, "batching.scope", scope, "world")

    @property
    def epoch(self) -> int:
        """Number of the current pass over the data."""
        return self._position.epoch

    @property
    def steps_left(self) -> int:
        """Steps of the current epoch still to come: as many as the rank with the most needs.

        Streamed text has no known length, so the configuration does not allow epochs with it.
        """
        sizes = self._part_sizes(self._position.epoch)
        left = (size - at for size, at in zip(sizes, self._position.positions, strict=True))
        return -(-max(left) // self._batch_size)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of a whole epoch."""
        return -(-max(self._part_sizes(self._position.epoch + 1)) // self._batch_size)

    def _part_sizes(self, epoch: int) -> list[int]:
        assert isinstance(self._stream, ShardStream)
        return self._stream.part_sizes(epoch)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where a run stood, on any number of ranks.

        Raises:
            ValueError: the state is damaged, or of other data, seed or shuffle_buffer.
        """
        self._position = StreamPosition.load(state, self._stream, self._ranks.world_size)

    def local_state(self, state: Mapping[str, Any]) -> str | None:
        """What lets this rank go on at a state without reading what comes before; None: nothing."""
        if not isinstance(self._stream, TextStream) or not state:
            return None
        at = StreamPosition.load(state, self._stream, self._ranks.world_size)
        place = self._stream.place(at.epoch, at.positions[self._ranks.rank])
        return None if place is None else json.dumps(place)

    def load_local_state(self, local: str) -> None:
        """Continues from what `local_state` returned on this rank."""
        if isinstance(self._stream, TextStream):
            self._stream.go_to(json.loads(local))

    def set_speeds(self, speeds: NDArray[np.float64], at: int) -> None:
        """Changes the speeds of all ranks, as `SpeedSampler.set_speeds`, but as soon as it can.

        In each round ranks tell each other their speeds, so `at` does not matter.
        """
        self._speed = float(speeds[self._ranks.rank])
        if self._exchange is not None:
            self._exchange.speed = self._speed

    @contextmanager
    def steps(
        self,
        collator: PackedCollator,
        progress: Iterator[float],
        *,
        pin_memory: bool,
        graph_shapes: GraphShapes | None = None,
    ) -> Iterator[Iterator[tuple[Step, FeedState]]]:
        """Steps from where the run stands, without end; all ranks enter and leave together.

        `next()` raises ExchangeError on all ranks where a rank's reader fails or is late.

        Args:
            collator: whose masks to make.
            progress: for each step, the share of training that is done before it.
            pin_memory: put steps into page-locked memory, for a GPU.
            graph_shapes: what passes are padded to; None to leave them as they are.
        """
        timeout = self._ranks.timeout.total_seconds()
        collate: StepCollator[ExampleBatch] = StepCollator(
            lambda examples, *at: pack_examples(examples, collator.masker, *at),
            self._batching.accumulation,
            graph_shapes,
        )

        def make_step(made: tuple[ExchangedStep, float], _: int) -> tuple[Step, FeedState]:
            given, done = made
            step = collate(given.examples, given.epoch, done)
            counts = {"exchange_seconds": given.seconds, "exchange_bytes": given.bytes_sent}
            step = replace(step, counts=step.counts | counts)
            if pin_memory:
                step = step.pin_memory()
            return step, FeedState(given.state, given.straggler_efficiency)

        exchange = self._exchange = ExampleExchange(
            self._stream,
            batch_size=self._batch_size,
            warmup=self._warmup,
            updates=self._updates,
            scope=self._batching.scope,
            dealing="lpt" if self._speed is None else "greedy",
            work=self._work,
            speed=self._speed,
            node_size=self._node_size,
            reader_timeout=timeout,
            # A rank joins a round as late as its reader lets it, and as training does.
            timeout=2 * timeout,
            state=self._position.state(self._stream.identity()),
        )
        prefetcher = Prefetcher(make_step, zip(exchange, progress, strict=False))
        patience = _STOP_SECONDS
        try:
            yield prefetcher
        except BaseException as error:
            self._ranks.note(error)  # or the others would only see that this one stops
            patience = _STOP_SECONDS_AFTER_ERROR
            raise
        finally:
            exchange.close(patience)
            prefetcher.close()
