"""Random examples as shards, whose feed rate is measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bert_unpad.data import ShardWriter, WordPieceTokenizer
from bert_unpad.data.text.tokenizer import SPECIAL_TOKENS

VOCABULARY = 30_522
CONTINUATIONS = 6000  # of BERT's vocabulary


def tokenizer() -> WordPieceTokenizer:
    """A vocabulary of BERT's size, with as many continuations of words."""
    words = [f"w{number}" for number in range(VOCABULARY - len(SPECIAL_TOKENS) - CONTINUATIONS)]
    return WordPieceTokenizer([*SPECIAL_TOKENS, *words, *(f"##{n}" for n in range(CONTINUATIONS))])


def write_shards(folder: Path, length: int, count: int) -> None:
    """Random pairs of segments, all of one length."""
    made, rng = tokenizer(), np.random.default_rng(0)
    tokens = rng.integers(len(SPECIAL_TOKENS), VOCABULARY, (count, length))
    seconds = rng.integers(2, length - 1, count)
    tokens[:, 0] = made.cls_id
    tokens[np.arange(count), seconds - 1] = tokens[:, -1] = made.sep_id
    with ShardWriter(
        folder,
        vocab_size=VOCABULARY,
        unmaskable_ids=made.unmaskable_ids,
        max_seq_length=length,
    ) as writer:
        labels = rng.integers(0, 2, count)
        writer.append(tokens.ravel(), np.full(count, length), seconds, labels)
