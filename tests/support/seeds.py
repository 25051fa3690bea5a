"""One seed for a run of the tests, from which every random choice follows.

`pytest --seed N` sets it, `bash scripts/test.sh` takes 0 where none is given, and processes that
tests start read it from the environment.
"""

import os
import random

SEED = "BERT_UNPAD_TEST_SEED"
"""The environment variable with the run's seed."""
os.environ.setdefault(SEED, str(random.SystemRandom().randrange(2**32)))


def derived(number: int) -> int:
    """Returns a seed made of the run's and `number`, which tells one test's draws from another's.

    With a run's seed of 0 it is `number` itself.
    """
    return number + int(os.environ[SEED]) * 1_000_003
