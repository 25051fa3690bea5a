"""Masked-token selection over a packed batch, as a pure function of coordinates.

Every random decision is a hash of (seed, epoch, example index, position in the example): splitmix64
(Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators") used as a counter-based
generator. So a fresh mask is drawn each epoch without storing any, and it is the same however the
examples are split over ranks, batches and workers. All of it is array arithmetic: a batch costs a
few sorts instead of a loop over its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from bert_unpad.data.random_hash import GAMMA, splitmix64
from bert_unpad.data.store.dataset import ExampleDataset
from bert_unpad.data.text.tokenizer import TextTokenizer

_MASK64 = (1 << 64) - 1
_MASKED = int(0.8 * 2**32)  # of what is predicted: 80 % becomes [MASK],
_REPLACED = int(0.9 * 2**32)  # 10 % another token, 10 % stays
_LONGEST_SPAN = 10  # words
# Of 2^32 random numbers, those below entry i make a span of at most i + 1 words: a geometric
# distribution with p = 0.2, of which lengths above the greatest are left out (SpanBERT; mean 3.8).
_SPAN_LENGTHS = np.array(
    [(5**10 - 4**n * 5 ** (10 - n)) * 2**32 // (5**10 - 4**10) for n in range(1, _LONGEST_SPAN)],
    np.uint64,
)
_MAX_SEQUENCES = 1 << 24  # bits of a sort key: 24 sequence, 24 hash, 16 position


MaskUnit = Literal["token", "word", "span"]


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


_Chosen = tuple[NDArray[np.int64], NDArray[np.int64]]


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

    def random_numbers(self, items: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the numbers of the items in their random order."""
        owner, place = self.random_order(items)
        number = np.empty(len(self.input_ids), np.int64)
        number[items] = np.arange(len(items))
        return number[self.begins[owner] + place]


class TokenMasker:
    """Chooses the tokens to predict and their replacements (Devlin et al. 2018, section 3.1).

    Of a sequence of length s, round(rate * s) tokens are predicted, at least one, at most
    `max_predictions_per_seq`, never a special token. 80 % of them are replaced by [MASK], 10 % by a
    random ordinary token, 10 % stay.

    Args:
        tokenizer: knows the special ids and the tokens that continue a word.
        masked_lm_prob: the rate, in (0, 1): share of a sequence's tokens to predict. Two numbers:
            it goes from the first to the second in proportion to the progress of training.
        mask_unit: what is chosen as one.
            token: tokens.
            word: whole words. They are tried in random order, and each that still fits the number
                above is chosen, as in Google's whole-word masking. If no word fits, one is chosen
                anyway, cut to `max_predictions_per_seq` tokens.
            span: runs of words (Joshi et al., 2020, arXiv:1907.10529). Their lengths are geometric
                (p = 0.2) with at most 10 words, mean 3.8. Spans are drawn until the number above is
                reached, to which the last one is cut; they end at special tokens and may overlap.
                The tokens of a span are all replaced by [MASK], all by random tokens, or all stay.
        always_mask: replace all of what is predicted by [MASK], as ELECTRA's generator sees it.
        max_predictions_per_seq: largest number of predictions per sequence, or None.
        seed: any integer.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        masked_lm_prob: float | Sequence[float] = 0.15,
        mask_unit: MaskUnit = "token",
        always_mask: bool = False,
        max_predictions_per_seq: int | None = None,
        seed: int = 0,
    ) -> None:
        self._rates = masking_rates(masked_lm_prob)
        check_masking_arguments(mask_unit, max_predictions_per_seq)
        self._masked = 2**32 if always_mask else _MASKED
        self._choose = {
            "token": self._choose_tokens,
            "word": self._choose_words,
            "span": self._choose_spans,
        }[mask_unit]
        self.max_predictions_per_seq = max_predictions_per_seq
        self.seed = seed
        self.mask_id = tokenizer.mask_id
        self._maskable = np.ones(tokenizer.vocab_size, bool)
        self._maskable[list(tokenizer.unmaskable_ids)] = False
        ordinary = self._maskable.copy()
        if tokenizer.unk_id is not None:
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
        progress: float = 1.0,
    ) -> MaskedTokens:
        """Masks a packed batch.

        Args:
            input_ids: int64 [T], true ids; not changed.
            lengths: [B], tokens of each sequence (up to 65,535); T in all.
            example_indices: [B], the index of each sequence's example in the data set.
            epoch: number of the epoch; each has different masks.
            progress: share of training that is done, 0 to 1; only a rate of two numbers depends on
                it.

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
        first, last = self._rates
        rate = last if first == last else first + (last - first) * progress
        quota = np.maximum(np.rint(lengths * rate).astype(np.int64), 1)
        if self.max_predictions_per_seq is not None:
            quota = np.minimum(quota, self.max_predictions_per_seq)
        batch = _Batch(input_ids, sequence, position, hashes, begins, quota)
        positions, deciding = self._choose(candidates, batch)

        labels = input_ids[positions]
        second = splitmix64(hashes[positions] ^ np.uint64(GAMMA))
        action = splitmix64(hashes[deciding] ^ np.uint64(GAMMA)) >> np.uint64(32)
        draw = (second & np.uint64(0xFFFFFFFF)) * np.uint64(len(self._replacements))
        replacement = self._replacements[(draw >> np.uint64(32)).astype(np.int64)]
        masked = input_ids.copy()
        masked[positions] = np.where(
            action < np.uint64(self._masked),
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

    # Each of these returns the chosen tokens, ascending, and for each the token whose hash decides
    # whether it is replaced.

    def _choose_tokens(self, candidates: NDArray[np.int64], batch: _Batch) -> _Chosen:
        """Chooses each sequence's `quota` candidates with the smallest hashes."""
        owner, place = batch.random_order(candidates)
        rank = np.arange(len(owner)) - _group_begins(owner, len(batch.quota))[owner]
        chosen = rank < batch.quota[owner]
        positions = np.sort(batch.begins[owner[chosen]] + place[chosen])
        return positions, positions

    def _words(
        self, candidates: NDArray[np.int64], batch: _Batch
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Returns the number of each candidate's word, and which candidates begin a run of words.

        A run ends with its sequence or at a special token.
        """
        begins_run = batch.position[candidates] == 0
        begins_run[:1] = True
        begins_run[1:] |= candidates[1:] - candidates[:-1] > 1
        # A continuation whose beginning was cut off (by truncation) begins a word itself.
        is_head = ~self._is_continuation[batch.input_ids[candidates]] | begins_run
        return np.cumsum(is_head) - 1, begins_run

    def _choose_words(self, candidates: NDArray[np.int64], batch: _Batch) -> _Chosen:
        """Chooses words in random order while they fit the quota."""
        if not len(candidates):
            return candidates, candidates
        word, _ = self._words(candidates, batch)
        heads = candidates[_group_begins(word, word[-1] + 1)]
        sizes = np.bincount(word)

        order = batch.random_numbers(heads)  # word numbers in random order
        owner = batch.sequence[heads[order]]
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
        positions = candidates[candidates - heads[word] < most[word]]
        return positions, positions

    def _choose_spans(self, candidates: NDArray[np.int64], batch: _Batch) -> _Chosen:
        """Chooses the tokens of spans in random order until the quota is reached.

        A span begins at each word. So a token belongs to the first span, in random order, of those
        that cover it, and the first tokens in this order are the chosen ones.
        """
        if not len(candidates):
            return candidates, candidates
        word, begins_run = self._words(candidates, batch)
        first = _group_begins(word, word[-1] + 1)
        heads, run = candidates[first], np.cumsum(begins_run)[first]
        order = batch.random_numbers(heads)
        rank = np.empty(len(heads), np.int64)
        rank[order] = np.arange(len(heads))
        draw = splitmix64(~batch.hashes[heads]) >> np.uint64(32)
        size = 1 + np.searchsorted(_SPAN_LENGTHS, draw, side="right")
        earliest = rank.copy()  # of the spans that cover each word
        for offset in range(1, min(_LONGEST_SPAN, len(heads))):
            covers = (size[:-offset] > offset) & (run[:-offset] == run[offset:])
            np.minimum(*(earliest[offset:], rank[:-offset]), out=earliest[offset:], where=covers)

        in_order = np.argsort(earliest[word], kind="stable")
        owner = batch.sequence[candidates[in_order]]
        place = np.arange(len(owner)) - _group_begins(owner, len(batch.quota))[owner]
        chosen = np.sort(in_order[place < batch.quota[owner]])
        return candidates[chosen], heads[order[earliest[word[chosen]]]]


def masking_rates(masked_lm_prob: float | Sequence[float]) -> tuple[float, float]:
    """Returns the rates at the beginning and at the end of training.

    Raises:
        ValueError: they are not one or two numbers in (0, 1).
    """
    rates = (masked_lm_prob,) if isinstance(masked_lm_prob, int | float) else tuple(masked_lm_prob)
    if not 1 <= len(rates) <= 2 or not all(0 < rate < 1 for rate in rates):
        raise ValueError(
            f"masked_lm_prob: expected a share between 0 and 1, or two, got {masked_lm_prob}"
        )
    return rates[0], rates[-1]


def check_masking_arguments(mask_unit: str, max_predictions_per_seq: int | None) -> None:
    """Raises a ValueError that names the argument unless both are in range."""
    if mask_unit not in get_args(MaskUnit):
        raise ValueError(
            f"mask_unit: expected one of {', '.join(get_args(MaskUnit))}, got {mask_unit!r}"
        )
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
