"""Shows on a few held-out examples what the model puts in place of masked tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from bert_unpad.data import PreparedData
from bert_unpad.nn import EncoderForPreTraining

__all__ = ["FilledText", "fill_masks"]


@dataclass(frozen=True)
class FilledText:
    """One example."""

    text: str
    """The text with its masks, as the model has seen it."""
    guesses: tuple[tuple[str, str, float], ...]
    """For each token to predict: what was there, what the model says, its probability."""


@torch.no_grad()
def fill_masks(model: EncoderForPreTraining, data: PreparedData, examples: int) -> list[FilledText]:
    """Fills the masks of held-out examples of about median length.

    The model must be on one device and is left in evaluation mode.
    """
    lengths = data.validation.lengths.astype(np.int64)
    near_median = np.argsort(np.abs(lengths - np.median(lengths)), kind="stable")[:examples]
    device = next(model.parameters()).device
    model.eval()
    collate = data.collator("validation")
    filled = []
    for index in near_median:
        inputs = collate(np.array([index]), 0)
        logits, _ = model.logits(inputs.to(device))
        known = logits[:, : data.tokenizer.vocab_size]  # the model's vocabulary may be larger
        probability, guess = known.float().softmax(-1).max(-1)
        guesses = zip(
            (data.tokenizer.vocabulary[i] for i in inputs.masked_labels.tolist()),
            (data.tokenizer.vocabulary[i] for i in guess.tolist()),
            probability.tolist(),
            strict=True,
        )
        filled.append(FilledText(data.tokenizer.decode(inputs.input_ids.tolist()), tuple(guesses)))
    return filled
