"""Small models and lengths for tests of cost models."""

import numpy as np

from bert_unpad.nn import BertConfig

TINY = BertConfig(
    vocab_size=64,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=64,
)


def all_of(length: int) -> np.ndarray:
    """The histogram of sequences of one length."""
    counts = np.zeros(length + 1, np.int64)
    counts[length] = 1
    return counts
