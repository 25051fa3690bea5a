"""Masked-token selection over a packed batch, as a pure function of coordinates.

Every random decision is a hash of (seed, epoch, example index, position in the example): splitmix64
(Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators") used as a counter-based
generator. So a fresh mask is drawn each epoch without storing any, and it is the same however the
examples are split over ranks, batches and workers. All of it is array arithmetic: a batch costs a
few sorts instead of a loop over its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bert_unpad.data.random_hash import GAMMA, splitmix64
from bert_unpad.data.store.dataset import ExampleDataset
from bert_unpad.data.text.tokenizer import WordPieceTokenizer

_MASK64 = (1 << 64) - 1
_MASKED = int(0.8 * 2**32)  # of what is predicted: 80 % becomes [MASK],
_REPLACED = int(0.9 * 2**32)  # 10 % another token, 10 % stays
_MAX_SEQUENCES = 1 << 24  # bits of a sort key: 24 sequence, 24 hash, 16 position


class MaskedTokens(NamedTuple):
    """Result of masking a packed batch.

    Attributes:
        input_ids: int64 [T], what the model sees.
        positions: int64 [M], ascending places in the packed buffer that are to be predicted.
        labels: int64 [M], the true ids there.
    """

    input_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class _Batch:
    """T tokens of B sequences, and how many of them to choose."""

    input_ids: NDArray[np.int64]
    """[T]: token ids."""
    sequence: NDArray[np.int64]
    """[T]: the sequence of each token."""
    position: NDArray[np.int64]
    """[T]: the position of each token in its sequence."""
    hashes: NDArray[np.uint64]
    """[T]: a random number for each token."""
    begins: NDArray[np.int64]
    """[B]: the first token of each sequence."""
    quota: NDArray[np.int64]
    """[B]: how many tokens of each sequence to choose."""

    def random_order(self, items: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns (sequence, position) of the items, ordered by sequence, at random within each.

        The sort key contains the position. So keys are unique, the order does not depend on how a
        sort treats ties, and values are sorted, which is faster than sorting indices.
        """
        key = self.sequence[items].astype(np.uint64) << np.uint64(40)
        key |= (self.hashes[items] >> np.uint64(40)) << np.uint64(16)
        key |= self.position[items].astype(np.uint64)
        key.sort()
        return (key >> np.uint64(40)).astype(np.int64), (key & np.uint64(0xFFFF)).astype(np.int64)


class TokenMasker:
    """Chooses the tokens to predict and their replacements (Devlin et al. 2018, section 3.1).

    Of a sequence of length s, round(`masked_lm_prob` * s) tokens are predicted, at least one, at
    most `max_predictions_per_seq`, never a special token. 80 % of them are replaced by [MASK], 10 %
    by a random ordinary token, 10 % stay.

    Args:
        tokenizer: knows the special ids and the tokens that continue a word.
        masked_lm_prob: share of a sequence's tokens to predict, in (0, 1).
        whole_word: choose words instead of tokens. Words are tried in random order, and each that
            still fits the number above is chosen, as in Google's whole-word masking. If no word
            fits, one is chosen anyway, cut to `max_predictions_per_seq` tokens.
        max_predictions_per_seq: largest number of predictions per sequence, or None.
        seed: any integer.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        tokenizer: WordPieceTokenizer,
        *,
        masked_lm_prob: float = 0.15,
        whole_word: bool = False,
        max_predictions_per_seq: int | None = None,
        seed: int = 0,
    ) -> None:
        check_masking_arguments(masked_lm_prob, max_predictions_per_seq)
        self.masked_lm_prob = masked_lm_prob
        self.whole_word = whole_word
        self.max_predictions_per_seq = max_predictions_per_seq
        self.seed = seed
        self.mask_id = tokenizer.mask_id
        self._maskable = np.ones(tokenizer.vocab_size, bool)
        self._maskable[list(tokenizer.unmaskable_ids)] = False
        ordinary = self._maskable.copy()
        ordinary[tokenizer.unk_id] = False
        self._replacements = np.flatnonzero(ordinary)
        if not len(self._replacements):
            raise ValueError("tokenizer: expected ordinary tokens besides the special ones")
        self._is_continuation = tokenizer.is_continuation

    def __call__(
        self,
        input_ids: NDArray[np.int64],
        lengths: NDArray[np.integer],
        example_indices: NDArray[np.integer],
        epoch: int,
    ) -> MaskedTokens:
        """Masks a packed batch.

        Args:
            input_ids: int64 [T], true ids; not changed.
            lengths: [B], tokens of each sequence (up to 65,535); T in all.
            example_indices: [B], the index of each sequence's example in the data set.
            epoch: number of the epoch; each has different masks.

        Raises:
            ValueError: sizes do not fit together, or there are 2^24 sequences or more.
        """
        lengths = np.asarray(lengths, np.int64)
        if lengths.sum() != len(input_ids) or len(lengths) != len(example_indices):
            raise ValueError(
                "lengths: expected one per example index, with the number of input_ids as sum; got "
                f"{len(lengths)} lengths of sum {lengths.sum()}, {len(example_indices)} indices, "
                f"{len(input_ids)} input_ids"
            )
        if len(lengths) >= _MAX_SEQUENCES:
            raise ValueError(f"lengths: expected fewer than {_MAX_SEQUENCES} sequences in a batch")
        begins = np.cumsum(lengths) - lengths
        sequence = np.repeat(np.arange(len(lengths)), lengths)
        position = np.arange(len(input_ids)) - begins[sequence]
        hashes = self._hashes(example_indices, epoch)[sequence]
        hashes = splitmix64(hashes + position.astype(np.uint64) * np.uint64(GAMMA))

        candidates = np.flatnonzero(self._maskable[input_ids])
        # int(rint) is Python's round(), which the original uses.
        quota = np.maximum(np.rint(lengths * self.masked_lm_prob).astype(np.int64), 1)
        if self.max_predictions_per_seq is not None:
            quota = np.minimum(quota, self.max_predictions_per_seq)
        choose = self._choose_words if self.whole_word else self._choose_tokens
        positions = choose(candidates, _Batch(input_ids, sequence, position, hashes, begins, quota))

        labels = input_ids[positions]
        second = splitmix64(hashes[positions] ^ np.uint64(GAMMA))
        action = second >> np.uint64(32)
        draw = (second & np.uint64(0xFFFFFFFF)) * np.uint64(len(self._replacements))
        replacement = self._replacements[(draw >> np.uint64(32)).astype(np.int64)]
        masked = input_ids.copy()
        masked[positions] = np.where(
            action < np.uint64(_MASKED),
            self.mask_id,
            np.where(action < np.uint64(_REPLACED), replacement, labels),
        )
        return MaskedTokens(masked, positions, labels)

    def _hashes(self, example_indices: NDArray[np.integer], epoch: int) -> NDArray[np.uint64]:
        """Returns one generator state per sequence."""
        key = np.array([self.seed & _MASK64], np.uint64)
        key = splitmix64(splitmix64(key) + np.uint64(epoch & _MASK64))
        indices = np.asarray(example_indices, np.int64).astype(np.uint64)
        return splitmix64(key + indices * np.uint64(GAMMA))

    def _choose_tokens(self, candidates: NDArray[np.int64], batch: _Batch) -> NDArray[np.int64]:
        """Chooses each sequence's `quota` candidates with the smallest hashes; ascending."""
        owner, place = batch.random_order(candidates)
        rank = np.arange(len(owner)) - _group_begins(owner, len(batch.quota))[owner]
        chosen = rank < batch.quota[owner]
        return np.sort(batch.begins[owner[chosen]] + place[chosen])

    def _choose_words(self, candidates: NDArray[np.int64], batch: _Batch) -> NDArray[np.int64]:
        """Chooses words in random order while they fit the quota; returns ascending tokens."""
        if not len(candidates):
            return candidates
        # A continuation whose beginning was cut off (by truncation) begins a word itself.
        is_head = ~self._is_continuation[batch.input_ids[candidates]]
        is_head |= batch.position[candidates] == 0
        is_head[0] = True
        is_head[1:] |= candidates[1:] - candidates[:-1] > 1
        word = np.cumsum(is_head) - 1
        heads = candidates[is_head]
        sizes = np.bincount(word)

        owner, place = batch.random_order(heads)
        number = np.empty(len(batch.input_ids), np.int64)
        number[heads] = np.arange(len(heads))
        order = number[batch.begins[owner] + place]  # word numbers in random order
        size = sizes[order]
        taken = np.zeros(len(order), bool)
        left = batch.quota.copy()
        # This gives the same words as trying them one by one, without a loop over words. Each round
        # accepts, in each sequence, the longest run of words that fits as a whole. The word that
        # ends a run never fits again, so a few rounds suffice.
        open_ = np.flatnonzero(size <= left[owner])
        while len(open_):
            open_owner, open_size = owner[open_], size[open_]
            total = np.cumsum(open_size)
            first = _group_begins(open_owner, len(batch.quota))[open_owner]
            fits = total - (total[first] - open_size[first]) <= left[open_owner]
            taken[open_[fits]] = True
            left -= np.bincount(
                open_owner[fits], open_size[fits].astype(float), minlength=len(batch.quota)
            ).astype(np.int64)
            open_ = open_[~fits]
            open_ = open_[size[open_] <= left[owner[open_]]]

        first_of_owner = np.concatenate(([0], np.flatnonzero(owner[1:] != owner[:-1]) + 1))
        none_fits = left[owner[first_of_owner]] == batch.quota[owner[first_of_owner]]
        taken[first_of_owner[none_fits]] = True

        most = np.zeros(len(sizes), np.int64)
        most[order[taken]] = size[taken]
        if self.max_predictions_per_seq is not None:
            most = np.minimum(most, self.max_predictions_per_seq)
        return candidates[candidates - heads[word] < most[word]]


def check_masking_arguments(masked_lm_prob: float, max_predictions_per_seq: int | None) -> None:
    """Raises a ValueError that names the argument unless both are in range."""
    if not 0 < masked_lm_prob < 1:
        raise ValueError(f"masked_lm_prob: expected a share between 0 and 1, got {masked_lm_prob}")
    if max_predictions_per_seq is not None and max_predictions_per_seq < 1:
        raise ValueError(
            f"max_predictions_per_seq: expected None or at least 1, got {max_predictions_per_seq}"
        )


def _group_begins(owner: NDArray[np.int64], groups: int) -> NDArray[np.int64]:
    """Returns where each group 0..groups-1 begins in a sorted array of group numbers."""
    return np.searchsorted(owner, np.arange(groups))


def most_frequent_token_rate(dataset: ExampleDataset) -> float:
    """Returns the masked-LM accuracy of always predicting the most frequent token.

    Counts the masked tokens if the data has masks, else all tokens that may be predicted. Returns
    0.0 for an empty data set. A model that is not better than this has learned nothing.
    """
    counts = dataset.target_counts()
    return float(counts.max() / counts.sum()) if counts.any() else 0.0
