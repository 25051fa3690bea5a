"""Feeds the training loop: what one rank does in one step, prepared ahead in a background thread.

A step is one update of the parameters. The sampler gives this rank's examples for it; accumulation
cuts them into as many forward and backward passes. The sampler's state travels with the step it
belongs to, because the sampler itself is ahead of training by what waits in the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from bert_unpad.batch import PackedInputs
from bert_unpad.batch.graph_shapes import GraphShapes
from bert_unpad.data import ExampleBatch, Prefetcher
from bert_unpad.data.sampling.balanced_sampler import BalancedSampler
from bert_unpad.data.sampling.packed_sampler import PackedSampler
from bert_unpad.data.sampling.speed_sampler import SpeedSampler
from bert_unpad.data.sampling.warmup_sampler import WarmupSampler

_Examples = TypeVar("_Examples", NDArray[np.integer], ExampleBatch)  # their indices, or themselves


@dataclass(frozen=True)
class Step:
    """One rank's part of one update."""

    passes: tuple[PackedInputs, ...]
    """The inputs of each forward and backward pass; some or all may be empty."""
    epoch: int
    """Number of the pass over the data."""
    indices: np.ndarray
    """int64: places of the examples in the training set (or their ids, if it has no places)."""
    counts: dict[str, float]
    """Counts of this rank: masked (tokens with a label), pairs (next-sentence labels), sequences
    and tokens."""
    lengths: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """int: real tokens of each sequence, over all passes."""
    num_masked: int = 0
    """Tokens whose logits are needed, over all passes."""

    def pin_memory(self) -> Step:
        """A copy of the step in page-locked memory."""
        return replace(self, passes=tuple(inputs.pin_memory() for inputs in self.passes))


def count_labels(inputs: PackedInputs) -> tuple[int, int]:
    """Masked tokens and next-sentence labels that the losses of host inputs add up over."""
    masked = int((inputs.masked_labels >= 0).sum())
    return masked, int((inputs.query_rows.cls_labels >= 0).sum())


class StepCollator(Generic[_Examples]):
    """Makes a `Step` of examples or their indices; a function of its arguments alone.

    Args:
        collator: makes one packed batch of what the step is made of, in an epoch, at a share of
            training.
        accumulation: passes per step.
        graph_shapes: what passes are padded to; None to leave them as they are.
    """

    def __init__(
        self,
        collator: Callable[[_Examples, int, float], PackedInputs],
        accumulation: int,
        graph_shapes: GraphShapes | None = None,
    ) -> None:
        self._collate: Callable[[_Examples, int, float], PackedInputs] = collator
        self._accumulation = accumulation
        self._graph_shapes = graph_shapes

    def __call__(self, examples: _Examples, epoch: int, progress: float) -> Step:
        """Dealing every n-th example to a pass keeps passes alike where examples are sorted.

        Args:
            examples: of this rank.
            epoch: number of the pass over the data.
            progress: share of training that is done, 0 to 1.
        """
        passes = tuple(
            self._collate(examples[first :: self._accumulation], epoch, progress)
            for first in range(self._accumulation)
        )
        lengths = [np.asarray(inputs.batch.lengths) for inputs in passes]
        num_masked = sum(inputs.num_masked for inputs in passes)
        labels = [count_labels(inputs) for inputs in passes]
        counts: dict[str, float] = {
            "masked": sum(masked for masked, _ in labels),
            "pairs": sum(pairs for _, pairs in labels),
            "sequences": len(examples),
            "tokens": sum(inputs.batch.total for inputs in passes),
        }
        if self._graph_shapes is not None:  # padding counts for nothing
            passes = tuple(self._graph_shapes.pad(inputs) for inputs in passes)
        indices = examples.ids if isinstance(examples, ExampleBatch) else examples
        return Step(passes, epoch, indices, counts, np.concatenate(lengths), num_masked)


@dataclass(frozen=True)
class FeedState:
    """What the sampler knows about one step."""

    sampler: dict[str, Any]
    """State of the sampler after the step."""
    straggler_efficiency: float | None
    """Mean work of the ranks divided by the greatest; None where it is not computed."""
    rows: int | None = None
    """Rows that the step's sequences are packed into, over all ranks; None: one row each."""


def endless_steps(
    collator: StepCollator[NDArray[np.integer]],
    sampler: BalancedSampler | PackedSampler | SpeedSampler | WarmupSampler,
    progress: Iterator[float],
    *,
    pin_memory: bool,
    efficiency: bool,
) -> Generator[tuple[Step, FeedState], None, None]:
    """Steps from where the sampler stands, one epoch after another, without end.

    Args:
        collator: makes the steps.
        sampler: says which examples.
        progress: for each step, the share of training that is done before it.
        pin_memory: put them into page-locked memory, for a GPU.
        efficiency: compute the straggler efficiency of each step. It needs the plan of all ranks,
            so one rank is enough.
    """

    def state() -> FeedState:
        return FeedState(
            sampler.state_dict(),
            sampler.straggler_efficiency() if efficiency else None,
            sampler.rows_in_step,
        )

    while True:
        with Prefetcher(
            lambda given, epoch: collator(given[0], epoch, given[1]),
            zip(sampler, progress, strict=False),  # which ends before it asks for a share
            epoch=sampler.epoch,
            pin_memory=pin_memory,
            get_state=state,
        ) as prefetcher:
            for step in prefetcher:
                yield step, prefetcher.state
