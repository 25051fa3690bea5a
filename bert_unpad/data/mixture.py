"""Mixtures of sources: which share of an epoch's examples comes from each.

An epoch of a mixture is as long as all its sources together. A source is gone through again and
again, in another order each time, and an epoch goes on with it where the one before has ended. So
after any epoch, some examples of a source may have been used once more than others. Which examples
an epoch has is a pure function of the seed and the epoch, so all ranks agree, and resuming needs no
more than a position in the epoch.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from bert_unpad.data.random_hash import splitmix64
from bert_unpad.data.store.dataset import ExampleDataset
from bert_unpad.data.store.example_batch import ExampleBatch

_MAX_EXAMPLES = 2**32 - 2  # of the balancer


class Joined:
    """An `ExampleDataset` of the examples of several, one after another.

    Args:
        parts: data sets with the same vocabulary; all or none have masks.
        copies: how many times each is in a row; by default once. Copies of an example have their
            own ids, and so their own masks.
    """

    def __init__(
        self, parts: Sequence[ExampleDataset], copies: Sequence[int] | None = None
    ) -> None:
        copies = [1] * len(parts) if copies is None else copies
        some = [part for part in parts if len(part)] or parts[:1]
        ours, *others = ((p.vocab_size, p.unmaskable_ids, bool(p.has_masks)) for p in some)
        for theirs in others:
            if ours != theirs:
                raise ValueError(
                    "mixture: expected sources with one vocabulary that all bring masks, or none, "
                    f"got (vocab_size, unmaskable_ids, has_masks) = {ours} and {theirs}"
                )
        sizes = [len(part) * count for part, count in zip(parts, copies, strict=True)]
        if sum(sizes) > _MAX_EXAMPLES:
            raise ValueError(
                f"mixture: expected at most {_MAX_EXAMPLES:,} examples, counting a source as often "
                f"as an epoch begins it, got {sum(sizes):,}"
            )
        self.parts = list(parts)
        self.vocab_size, self.unmaskable_ids, self.has_masks = ours
        self.max_seq_length = max(part.max_seq_length for part in parts)
        self._begins = np.cumsum([0, *sizes])
        tiled = [np.tile(p.lengths, count) for p, count in zip(parts, copies, strict=True)]
        self.lengths = np.concatenate(tiled).astype(np.uint16)

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, indices: NDArray[np.integer]) -> ExampleBatch:
        """See `ExampleDataset`."""
        indices = np.asarray(indices, np.int64)
        owners = np.searchsorted(self._begins, indices, side="right") - 1
        found, places = [], []
        for number in np.unique(owners):
            here = np.flatnonzero(owners == number)
            part = self.parts[number]
            examples = part.batch((indices[here] - self._begins[number]) % len(part))
            found.append(dataclasses.replace(examples, ids=indices[here]))
            places.append(here)
        if not found:
            return ExampleBatch.empty(np.dtype(np.int64), self.has_masks)
        order = np.argsort(np.concatenate(places))
        return ExampleBatch.concatenate(found)[order]

    def target_counts(self) -> NDArray[np.int64]:
        """See `ExampleDataset`; counts each example once."""
        return np.sum([part.target_counts() for part in self.parts], axis=0)


class Mixture(Joined):
    """Sources with weights; what an epoch has of them is in `epoch_examples`.

    Args:
        parts: the sources; none is empty.
        weights: numbers > 0: in which proportion their examples are used.

    Attributes:
        draws: how many examples of each source an epoch has.
        epoch_size: their sum, which is the number of examples of all sources.
    """

    def __init__(self, parts: Sequence[ExampleDataset], weights: Sequence[float]) -> None:
        self.epoch_size = sum(len(part) for part in parts)
        self.draws = _shares(weights, self.epoch_size)
        # An epoch may begin and end within a pass, and so touch one more than it has examples for.
        passes = [
            -(-count // len(part)) + (count % len(part) != 0)
            for count, part in zip(self.draws, parts, strict=True)
        ]
        super().__init__(parts, passes)

    def identity(self) -> str:
        """Returns what a saved position depends on besides the lengths."""
        return json.dumps([self.draws, [len(part) for part in self.parts]])

    def epoch_examples(self, seed: int, epoch: int) -> NDArray[np.uint32]:
        """Returns the indices of an epoch's examples, ascending, [epoch_size].

        Args:
            seed: of the order in which sources are gone through.
            epoch: 0 or more.
        """
        chosen = []
        for number, (part, count) in enumerate(zip(self.parts, self.draws, strict=True)):
            size, first = len(part), epoch * count
            for turn in range(first // size, -(-(first + count) // size)):
                begin = max(first - turn * size, 0)
                end = min(first + count - turn * size, size)
                copy = int(self._begins[number]) + (turn - first // size) * size
                chosen.append(copy + _some(size, begin, end, (seed, number, turn)))
        return np.concatenate(chosen).astype(np.uint32)


def _some(size: int, begin: int, end: int, key: Sequence[int]) -> NDArray[np.int64]:
    """Returns places begin to end of a random order of `size` examples, ascending.

    The order sorts a hash of (key, example). Different examples have different hashes, so two
    thresholds choose exactly.
    """
    if (begin, end) == (0, size):
        return np.arange(size)
    state: NDArray[np.uint64] = np.zeros(1, np.uint64)
    for word in key:
        state = splitmix64(np.add(state, np.uint64(word)))
    hashes = splitmix64(np.add(state, np.arange(size, dtype=np.uint64)))
    places = np.unique([max(begin - 1, 0), end - 1])
    ordered = np.partition(hashes, places)
    chosen = hashes <= ordered[end - 1]
    if begin:
        chosen &= hashes > ordered[begin - 1]
    return np.flatnonzero(chosen)


def _shares(weights: Sequence[float], total: int) -> list[int]:
    """Divides `total` in proportion to the weights, each share 1 or more (largest remainders)."""
    exact = [weight / math.fsum(weights) * total for weight in weights]
    shares = [max(int(share), 1) for share in exact]
    while sum(shares) != total:
        step = 1 if sum(shares) < total else -1
        gaps = [(share - found) * step for share, found in zip(exact, shares, strict=True)]
        at = max(
            (i for i, found in enumerate(shares) if found + step > 0), key=lambda i: (gaps[i], -i)
        )
        shares[at] += step
    return shares


def check_mixture(mixture: Mapping[str, float]) -> None:
    """Checks `data.mixture`.

    Raises:
        ValueError: it is empty, a weight is out of range, or a source cannot be mixed.
    """
    if not mixture:
        raise ValueError("mixture: expected sources with weights, got none")
    for source, weight in mixture.items():
        if not 0 < weight < math.inf:
            raise ValueError(f"mixture: expected weights > 0, got {weight} of {source}")
        if source.startswith("stream:"):
            raise ValueError(
                f"mixture: expected sources whose number of examples is known, got {source}"
            )
