"""How far figures of a plan were off, where others or this package have measured the same."""

from typing import NamedTuple


class ErrorBand(NamedTuple):
    """Errors of predicted against published throughput, as shares of the published."""

    runs: int
    """Published runs."""
    median: float
    """Error of the median run."""
    most: float
    """Error that 9 of 10 runs do not exceed."""
    worst: float
    """Greatest error."""


PUBLISHED = ErrorBand(68, 0.036, 0.161, 0.453)
"""Errors for cards of the table, as benchmarks/results/model/published.json has them."""
CHECKED = 0.124
"""Greatest error of calibrated plans: benchmarks/results/cpu/plan_check.json."""


def error_sentence() -> str:
    """What a plan for cards of the table says of its error."""
    return (
        f"checked on {PUBLISHED.runs} published runs: half were predicted within "
        f"{PUBLISHED.median:.0%}, 9 of 10 within {PUBLISHED.most:.0%}, the worst was "
        f"{PUBLISHED.worst:.0%} off"
    )
