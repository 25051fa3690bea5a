"""Random choices of tests: others in each run, repeated by the seed that a failed run shows."""

from __future__ import annotations

import os
import random

SEED = "BERT_UNPAD_TEST_SEED"
"""The environment variable with the seed; drawn once for all processes of a run."""
os.environ.setdefault(SEED, str(random.SystemRandom().randrange(2**32)))


def fresh_random() -> random.Random:
    """Returns a generator, the same for all tests of a run."""
    return random.Random(os.environ[SEED])
