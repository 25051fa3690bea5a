"""Random examples as MLPerf's files have them, made without the package."""

import numpy as np

from bert_unpad.data.text.tokenizer import SPECIAL_TOKENS
from tests.support.seeds import derived

VOCAB = [*SPECIAL_TOKENS, *(f"w{i}" for i in range(95))]
CLS, SEP = 2, 3
LONGEST, PREDICTIONS = 24, 6


def masked_examples(count, seed=0):
    """Random examples as plain arrays: (ids, segments, positions, labels, next sentence)."""
    rng = np.random.default_rng(derived(seed))
    examples = []
    for _ in range(count):
        length = int(rng.integers(6, LONGEST + 1))
        second = int(rng.integers(3, length - 1))
        ids = rng.integers(5, 100, length)
        ids[[0, second - 1, length - 1]] = CLS, SEP, SEP
        ordinary = [i for i in range(length) if i not in (0, second - 1, length - 1)]
        masked = min(int(rng.integers(1, PREDICTIONS + 1)), len(ordinary))
        positions = np.sort(rng.choice(ordinary, masked, replace=False))
        labels = rng.integers(5, 100, masked)
        segments = (np.arange(length) >= second).astype(int)
        examples.append((ids, segments, positions, labels, int(rng.integers(2))))
    return examples
