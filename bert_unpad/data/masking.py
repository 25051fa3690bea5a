"""Masked-token selection over a packed batch, as a pure function of coordinates.

Every random decision is a hash of (seed, epoch, example index, position in the example): splitmix64
(Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators") used as a counter-based
generator. So a fresh mask is drawn each epoch without storing any, and it is the same however the
examples are split over ranks, batches and workers. `csrc/text/masking.cpp` draws them.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from bert_unpad._text import Masker, pack
from bert_unpad.data.store.dataset import ExampleDataset
from bert_unpad.data.text.tokenizer import TextTokenizer

_MASK64 = (1 << 64) - 1
# What a token id is, as bits of a byte; see `_text.Masker`.
_MASKABLE, _CONTINUATION, _REPLACEMENT = 1, 2, 4

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

            - token: tokens.
            - word: whole words. They are tried in random order, and each that still fits the number
              above is chosen, as in Google's whole-word masking. If no word fits, one is chosen
              anyway, cut to `max_predictions_per_seq` tokens.
            - span: runs of words (Joshi et al., 2020, arXiv:1907.10529). Their lengths are
              geometric (p = 0.2) with at most 10 words, mean 3.8. Spans are drawn until the number
              above is reached, to which the last one is cut; they end at special tokens and may
              overlap. The tokens of a span are all replaced by [MASK], all by random tokens, or all
              stay.

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
        self.max_predictions_per_seq = max_predictions_per_seq
        self.seed = seed
        self.mask_id = tokenizer.mask_id
        maskable = np.ones(tokenizer.vocab_size, bool)
        maskable[list(tokenizer.unmaskable_ids)] = False
        ordinary = maskable.copy()
        if tokenizer.unk_id is not None:
            ordinary[tokenizer.unk_id] = False
        if not ordinary.any():
            raise ValueError("tokenizer: expected ordinary tokens besides the special ones")
        kinds = _MASKABLE * maskable + _REPLACEMENT * ordinary
        kinds = kinds + _CONTINUATION * tokenizer.is_continuation
        self._masker = Masker(
            kinds.astype(np.uint8).tobytes(),
            unit=mask_unit,
            mask_id=tokenizer.mask_id,
            max_predictions=max_predictions_per_seq,
            always_mask=always_mask,
            seed=seed & _MASK64,
        )

    def __call__(
        self,
        input_ids: NDArray[np.integer],
        lengths: NDArray[np.integer],
        example_indices: NDArray[np.integer],
        epoch: int,
        progress: float = 1.0,
    ) -> MaskedTokens:
        """Masks a packed batch.

        Args:
            input_ids: integers [T], true ids; not changed.
            lengths: [B], tokens of each sequence (up to 65,535); T in all.
            example_indices: [B], the index of each sequence's example in the data set.
            epoch: number of the epoch; each has different masks.
            progress: share of training that is done, 0 to 1; only a rate of two numbers depends on
                it.

        Raises:
            ValueError: sizes do not fit together, a sequence is too long, or an id lies outside the
                vocabulary.
        """
        lengths = np.asarray(lengths, np.int64)
        if lengths.sum() != len(input_ids) or len(lengths) != len(example_indices):
            raise ValueError(
                "lengths: expected one per example index, with the number of input_ids as sum; got "
                f"{len(lengths)} lengths of sum {lengths.sum()}, {len(example_indices)} indices, "
                f"{len(input_ids)} input_ids"
            )
        begins = np.cumsum(lengths) - lengths
        masked, _ = self.pack(input_ids, begins, lengths, lengths, example_indices, epoch, progress)
        return masked

    def pack(
        self,
        tokens: NDArray[np.integer],
        begins: NDArray[np.integer],
        lengths: NDArray[np.integer],
        second_starts: NDArray[np.integer],
        example_indices: NDArray[np.integer],
        epoch: int,
        progress: float = 1.0,
    ) -> tuple[MaskedTokens, NDArray[np.int64]]:
        """Packs examples end to end and masks them, in one pass that does not hold the GIL.

        Args:
            tokens: integers [N], a buffer with the true ids of the examples.
            begins: [B], where each example begins in it.
            lengths: [B], its number of tokens (up to 65,535); T in all.
            second_starts: [B], where its second segment begins in the example.
            example_indices, epoch, progress: see `__call__`.

        Returns:
            The masked tokens, and token types int64 [T].

        Raises:
            ValueError: sizes do not fit together, an example lies outside the buffer or is too
                long, or an id lies outside the vocabulary.
        """
        first, last = self._rates
        input_ids, token_type_ids, positions, labels = pack(
            packable(tokens),
            *(np.asarray(each, np.int64) for each in (begins, lengths, second_starts)),
            masker=self._masker,
            examples=np.asarray(example_indices, np.int64),
            epoch=epoch & _MASK64,
            rate=last if first == last else first + (last - first) * progress,
        )
        return MaskedTokens(input_ids, positions, labels), token_type_ids


def packable(tokens: NDArray[np.integer]) -> NDArray[np.integer]:
    """Returns tokens as `_text.pack` takes them; a copy only if their type or layout is another."""
    known = tokens.dtype in (np.uint16, np.uint32, np.int32)
    return np.ascontiguousarray(tokens, None if known else np.int64)


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


def most_frequent_token_rate(dataset: ExampleDataset) -> float:
    """Returns the masked-LM accuracy of always predicting the most frequent token.

    Counts the masked tokens if the data has masks, else all tokens that may be predicted. Returns
    0.0 for an empty data set. A model that is not better than this has learned nothing.
    """
    counts = dataset.target_counts()
    return float(counts.max() / counts.sum()) if counts.any() else 0.0
