"""Types of command-line arguments, for argparse's `type`: numbers within bounds, lists of names."""

import argparse
from collections.abc import Callable, Sequence


def integer(text: str, least: int) -> int:
    """An integer of `least` or more, below 2**31."""
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value < 2**31:
        raise argparse.ArgumentTypeError(f"expected an integer of {least} or more, got {text!r}")
    return value


def positive(text: str) -> int:
    """An integer of 1 or more."""
    return integer(text, 1)


def not_negative(text: str) -> int:
    """An integer of 0 or more."""
    return integer(text, 0)


def above_zero(text: str) -> float:
    """A finite number above 0."""
    value = not_below_zero(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def not_below_zero(text: str) -> float:
    """A finite number of 0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of 0 or more, got {text!r}")
    return value


def share(text: str) -> float:
    """A number above 0, at most 1."""
    value = above_zero(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"expected a share above 0 and at most 1, got {text!r}")
    return value


def share_or_zero(text: str) -> float:
    """A number of 0 to 1."""
    value = not_below_zero(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"expected a share of 0 to 1, got {text!r}")
    return value


def names_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """The type of a comma-separated list of some of these names."""

    def names(text: str) -> list[str]:
        found = text.split(",")
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(
                    f"expected a comma-separated list of {', '.join(known)}, got {name!r}"
                )
        return found

    return names
