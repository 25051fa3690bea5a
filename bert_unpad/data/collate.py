"""From example indices to a packed batch, and a background thread that does it ahead of time.

The collator gathers the examples from the memory map in one indexing operation and puts the longest
sequence first, which makes the length groups of attention contiguous. Its output depends on the
indices and the epoch only: no state, so any rank or worker may produce any batch.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from bert_unpad.batch import PackedInputs, VarlenBatch
from bert_unpad.data.masking import MaskedTokens, TokenMasker
from bert_unpad.data.store.dataset import ExampleDataset
from bert_unpad.data.store.example_batch import ExampleBatch
from bert_unpad.data.text.tokenizer import WordPieceTokenizer


class PackedCollator:
    """Makes `PackedInputs` of examples, with masks that are new in every epoch.

    Examples that bring their masks keep them; the masking arguments then mean nothing.

    Args:
        dataset: the examples.
        tokenizer: the one the examples were made with.
        masked_lm_prob, whole_word, max_predictions_per_seq, seed: see `TokenMasker`. A mask depends
            on (seed, epoch, index of the example in `dataset`) alone.

    Raises:
        ValueError: a masking argument is out of range, or the tokenizer is not the data set's.
    """

    def __init__(
        self,
        dataset: ExampleDataset,
        tokenizer: WordPieceTokenizer,
        *,
        masked_lm_prob: float = 0.15,
        whole_word: bool = False,
        max_predictions_per_seq: int | None = None,
        seed: int = 0,
    ) -> None:
        ours = (tokenizer.vocab_size, tokenizer.unmaskable_ids)
        theirs = (dataset.vocab_size, dataset.unmaskable_ids)
        if ours != theirs:
            raise ValueError(
                "tokenizer: expected the one that made the data set, (vocab_size, unmaskable_ids) "
                f"= {theirs}, got {ours}"
            )
        self.dataset = dataset
        self.masker = TokenMasker(
            tokenizer,
            masked_lm_prob=masked_lm_prob,
            whole_word=whole_word,
            max_predictions_per_seq=max_predictions_per_seq,
            seed=seed,
        )

    def __call__(self, indices: NDArray[np.integer], epoch: int) -> PackedInputs:
        """Collate examples on the CPU.

        Args:
            indices: [B], places in the data set; B = 0 is allowed.
            epoch: number of the pass over the data.

        Returns:
            The batch, longest sequence first (equal lengths in the order given).

        Raises:
            IndexError: an index outside the data set.
        """
        dataset = self.dataset
        indices = np.asarray(indices, np.int64).reshape(-1)
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(dataset):
            raise IndexError(
                f"indices: expected 0 to {len(dataset) - 1}, got {indices.min()} to {indices.max()}"
            )
        return pack_examples(dataset.batch(indices), self.masker, epoch)


def pack_examples(examples: ExampleBatch, masker: TokenMasker, epoch: int) -> PackedInputs:
    """Packs and masks examples, wherever they come from; a function of its arguments alone.

    Args:
        examples: B of them; B = 0 is allowed.
        masker: of examples that do not bring their masks; a mask depends on its seed, the epoch and
            the example's id.
        epoch: number of the pass over the data.

    Returns:
        The batch on the CPU, longest sequence first (equal lengths in the order given).
    """
    examples = examples[np.argsort(-examples.lengths, kind="stable")]
    lengths = examples.lengths
    begins = np.cumsum(lengths) - lengths
    second = np.repeat(begins + examples.second_starts, lengths)
    tokens, given = examples.tokens.astype(np.int64), examples.masks
    if given is None:
        masked = masker(tokens, lengths, examples.ids, epoch)
    else:
        positions = np.repeat(begins, given.counts) + given.positions
        masked = MaskedTokens(tokens, positions, given.labels)
    return PackedInputs.build(
        batch=VarlenBatch.from_lengths(lengths),
        input_ids=torch.from_numpy(masked.input_ids),
        token_type_ids=torch.from_numpy((np.arange(len(second)) >= second).astype(np.int64)),
        masked_positions=torch.from_numpy(masked.positions),
        masked_labels=torch.from_numpy(masked.labels),
        next_sentence_labels=torch.from_numpy(examples.next_sentence_labels),
    )


Collated = TypeVar("Collated")


class _Channel(Generic[Collated]):
    """What the thread and the consumer share; the thread must not keep the Prefetcher alive."""

    def __init__(self, depth: int) -> None:
        self.ready: deque[tuple[Collated | None, Any, BaseException | None]] = deque()
        self.filled = threading.Semaphore(0)
        self.room = threading.Semaphore(depth)
        self.closed = False

    def put(self, inputs: Collated | None, state: Any, error: BaseException | None) -> None:
        self.ready.append((inputs, state, error))
        self.filled.release()


class Prefetcher(Iterator[Collated]):
    """Collates batches in a background thread, up to `depth` ahead of the consumer.

    Args:
        collator: called with (indices, epoch): a `PackedCollator`, or what makes more of it.
        batches: what the collator takes, e.g. a sampler's arrays of example indices; iterated in
            the thread.
        epoch: passed on to the collator.
        depth: how many finished batches may wait.
        pin_memory: call `pin_memory()` of what the collator made, for asynchronous copies to a GPU.
        get_state: called in the thread each time a batch has been taken from `batches`; what it
            returned for the batch last handed out is `state`. Give a sampler's `state_dict` here:
            asked directly it would already count batches that still wait.

    An error in the sampler or the collator is raised by `next()` in place of the batch it concerns.
    Use it as a context manager, or call `close()`, to stop early.

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
        """The next batch, as `next()` gives it.

        Raises:
            TimeoutError: there is none after this many seconds (None: wait for as long as it
                takes). Nothing is lost: ask again.
        """
        if self._channel.closed:
            raise StopIteration
        if not self._channel.filled.acquire(timeout=seconds):
            raise TimeoutError(f"no batch within {seconds} s")
        inputs, state, error = self._channel.ready.popleft()
        if error is not None:
            self.close()
            raise error
        if inputs is None:
            self.close()
            raise StopIteration
        self._channel.room.release()
        self.state = state
        return inputs

    @property
    def ended(self) -> bool:
        """Whether there is nothing more to come: closed, at the end, or after an error."""
        return self._channel.closed

    def close(self, seconds: float | None = None) -> None:
        """Stop the thread (after the batch it is at) and drop what waits. May be called twice.

        Args:
            seconds: wait no longer than this for the thread, which ends by itself later.
        """
        self._channel.closed = True
        self._channel.room.release()
        self._thread.join(seconds)
        self._channel.ready.clear()

    def __enter__(self) -> Prefetcher[Collated]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Abandoned without close(): let the thread end, but never wait in a finalizer.
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
                channel.put(None, None, None)
                return
            state = get_state() if get_state is not None else None
            inputs = collator(indices, epoch)
            channel.put(inputs.pin_memory() if pin_memory else inputs, state, None)
    except BaseException as error:
        channel.put(None, None, error)
