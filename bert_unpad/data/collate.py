"""From example indices to a packed batch.

The collator puts the longest sequence first, which makes the length groups of attention contiguous.
It has no state: its output depends only on the indices and the epoch. So any rank or worker can
make any batch. What grows with the tokens is done in C++ without the GIL: examples are copied from
the memory map, then packed and masked. So a thread that collates does not hold up one that trains.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from bert_unpad._text import pack
from bert_unpad.batch import PackedInputs, VarlenBatch
from bert_unpad.data.masking import MaskedTokens, MaskUnit, TokenMasker, packable
from bert_unpad.data.store.dataset import ExampleDataset
from bert_unpad.data.store.example_batch import ExampleBatch
from bert_unpad.data.text.tokenizer import TextTokenizer


class PackedCollator:
    """Makes `PackedInputs` of examples, with new masks in every epoch.

    Examples that have masks keep them; the masking arguments then have no effect.

    Args:
        dataset: the examples.
        tokenizer: the tokenizer that the examples were made with.
        masked_lm_prob, mask_unit, always_mask, max_predictions_per_seq, seed: see `TokenMasker`. A
            mask depends only on (seed, epoch, index of the example in `dataset`, and progress of
            training where the rate follows it).

    Raises:
        ValueError: a masking argument is out of range, or the tokenizer is not the data set's.
    """

    def __init__(
        self,
        dataset: ExampleDataset,
        tokenizer: TextTokenizer,
        *,
        masked_lm_prob: float | Sequence[float] = 0.15,
        mask_unit: MaskUnit = "token",
        always_mask: bool = False,
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
            mask_unit=mask_unit,
            always_mask=always_mask,
            max_predictions_per_seq=max_predictions_per_seq,
            seed=seed,
        )

    def __call__(
        self, indices: NDArray[np.integer], epoch: int, progress: float = 1.0
    ) -> PackedInputs:
        """Collates examples on the CPU.

        Args:
            indices: indices of examples in the data set, [B]; B = 0 is allowed.
            epoch: number of the pass over the data.
            progress: share of training that is done, 0 to 1.

        Returns:
            The batch, longest sequence first (sequences of equal length in the order given).

        Raises:
            IndexError: an index lies outside the data set.
        """
        dataset = self.dataset
        indices = np.asarray(indices, np.int64).reshape(-1)
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(dataset):
            raise IndexError(
                f"indices: expected 0 to {len(dataset) - 1}, got {indices.min()} to {indices.max()}"
            )
        return pack_examples(dataset.batch(indices), self.masker, epoch, progress)


def pack_examples(
    examples: ExampleBatch, masker: TokenMasker, epoch: int, progress: float = 1.0
) -> PackedInputs:
    """Packs and masks examples; the result depends only on the arguments.

    Args:
        examples: B examples; B = 0 is allowed.
        masker: draws the masks of examples that have none, by its seed, the epoch and the example's
            id.
        epoch: number of the pass over the data.
        progress: share of training that is done, 0 to 1.

    Returns:
        The batch on the CPU, longest sequence first (sequences of equal length in the order given).
    """
    order = np.argsort(-examples.lengths, kind="stable")
    lengths, second_starts = examples.lengths[order], examples.second_starts[order]
    begins = (np.cumsum(examples.lengths) - examples.lengths)[order]
    parts = (begins, lengths, second_starts)
    if examples.masks is None:
        masked, types = masker.pack(examples.tokens, *parts, examples.ids[order], epoch, progress)
    else:
        given = examples.masks[order]
        input_ids, types, _, _ = pack(packable(examples.tokens), *parts)
        positions = np.repeat(np.cumsum(lengths) - lengths, given.counts) + given.positions
        masked = MaskedTokens(input_ids, positions, given.labels)
    return PackedInputs.build(
        batch=VarlenBatch.from_lengths(lengths),
        input_ids=torch.from_numpy(masked.input_ids),
        token_type_ids=torch.from_numpy(types),
        masked_positions=torch.from_numpy(masked.positions),
        masked_labels=torch.from_numpy(masked.labels),
        next_sentence_labels=torch.from_numpy(examples.next_sentence_labels[order]),
    )
