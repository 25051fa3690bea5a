"""Step time from a few ranks to many thousands, the batch per rank held fixed (weak scaling)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bert_unpad.costs.step import StepModel
from bert_unpad.data.sampling.histogram import sample_lengths
from bert_unpad.simulate.epoch import SimulationResult, simulate

SCALING_RANKS = tuple(8 * 2**i for i in range(12))  # 8 to 16,384

# Examples simulated at a point, at most: at 0.1 to 0.2 microseconds each, a curve of 12 points
# takes a second or two, and 16,384 ranks x 16 still get 8 steps.
_MAX_EXAMPLES = 2**21


def scaling_curve(
    histogram: NDArray[np.int64],
    batch: int,
    strategies: Sequence[str],
    *,
    ranks: Sequence[int] = SCALING_RANKS,
    seed: int = 0,
    pool_steps: int = 64,
    model: StepModel | None = None,
    speeds: ArrayLike | None = None,
) -> list[SimulationResult]:
    """Simulates up to `pool_steps` steps of every strategy at every number of ranks.

    Args:
        histogram: int64, counts indexed by length; examples are drawn from it.
        batch: examples per rank and step.
        strategies: of `STRATEGIES`.
        ranks: the points of the curve.
        seed, pool_steps, model, speeds: see `simulate`. Where so many steps have more than 2
            million examples, fewer are taken, but at least two.

    Returns:
        A result for each number of ranks and, within it, each strategy.

    Raises:
        ValueError: an argument is out of range, or a number of ranks does not fill whole nodes.
    """
    results = []
    for number in ranks:
        steps = min(pool_steps, max(_MAX_EXAMPLES // (number * batch), 2))
        lengths = sample_lengths(steps * number * batch, seed, histogram)
        results += [
            simulate(
                *(lengths, number, batch, strategy),
                seed=seed,
                pool_steps=pool_steps,
                model=model,
                speeds=speeds,
            )
            for strategy in strategies
        ]
    return results
