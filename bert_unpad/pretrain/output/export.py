"""The trained model as a folder that transformers' Auto classes use as training did.

`AutoTokenizer` alone then gives the trainer's ids, and `AutoModelForMaskedLM` its loss. What
training knows without files is written down for that: the tokens around each text, how long a text
may be, and whether the model has token types.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from bert_unpad.data.text.tokenizer import TextTokenizer
from bert_unpad.nn import EncoderForPreTraining

__all__ = ["export"]


def export(
    model: EncoderForPreTraining, tokenizer: TextTokenizer, folder: Path, max_length: int
) -> None:
    """Writes the model and its tokenizer.

    Args:
        model: the trained model; its configuration gets the ids of the special tokens.
        tokenizer: of its data.
        folder: made if it does not exist.
        max_length: longest example that it has been trained on, in tokens.
    """
    for part in (model, getattr(model, "generator", None)):
        if part is not None:
            extra = part.config.extra | _special_ids(tokenizer)
            part.config = dataclasses.replace(part.config, extra=extra)
    model.save_pretrained(folder)
    tokenizer.export(folder, max_length, token_types=model.config.type_vocab_size > 1)


def _special_ids(tokenizer: TextTokenizer) -> dict[str, int]:
    return {
        "cls_token_id": tokenizer.cls_id,
        "sep_token_id": tokenizer.sep_id,
        "bos_token_id": tokenizer.cls_id,
        "eos_token_id": tokenizer.sep_id,
        "mask_token_id": tokenizer.mask_id,
    }
