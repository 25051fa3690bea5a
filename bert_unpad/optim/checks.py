"""What the optimizers refuse: a ValueError "name: expected X, got Y"."""

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any


def check_options(lr: float, betas: Sequence[float], eps: float, weight_decay: float) -> None:
    """Checks what all optimizers of this package take."""
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        check_number(name, value)
    in_range = isinstance(betas, tuple | list) and all(_is_number(beta, 1) for beta in betas)
    if not in_range or len(betas) != 2:
        raise ValueError(f"betas: expected two numbers in [0, 1), got {betas!r}")


def check_number(name: str, value: Any, below: float = math.inf) -> None:
    """Checks a number of 0 or more, below a bound."""
    if not _is_number(value, below):
        expected = "a number of 0 or more" if below == math.inf else f"a number in [0, {below:g})"
        raise ValueError(f"{name}: expected {expected}, got {value!r}")


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Checks an integer of `least` or more."""
    if not is_count(value, least):
        raise ValueError(f"{name}: expected an integer of {least} or more, got {value!r}")


def is_count(value: Any, least: int = 1) -> bool:
    """Whether a value is an integer of `least` or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: Any, below: float) -> bool:
    real = isinstance(value, Real) and not isinstance(value, bool)
    return real and 0 <= value < below
