"""Random numbers as hashes of coordinates, for whole arrays, without any state to save or share.

This uses splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA
2014) as a counter-based generator.
"""

import numpy as np
from numpy.typing import NDArray

_GAMMA = 0x9E3779B97F4A7C15  # splitmix64's increment: 2^64 / golden ratio


def splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Applies splitmix64's output function to states x (uint64, any shape)."""
    x = x + np.uint64(_GAMMA)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
