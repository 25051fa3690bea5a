"""What modelled times depend on besides what is counted, at a slow and at a fast end."""

from __future__ import annotations

from typing import NamedTuple


class Rates(NamedTuple):
    products: float
    """FLOP/s of matrix products."""
    memory: float
    """Bytes a second."""
    gap: float
    """Seconds between two kernels."""
    clock: float
    """Hz, which attention's times are counted in."""


# Assumed, around what benchmarks/calibrate.py has measured.
RANGES = {
    "H100": (Rates(560e12, 2.4e12, 2.5e-6, 1.41e9), Rates(680e12, 3.0e12, 0.75e-6, 1.755e9)),
    "H200": (Rates(560e12, 3.5e12, 2.5e-6, 1.41e9), Rates(680e12, 4.3e12, 0.75e-6, 1.755e9)),
}
