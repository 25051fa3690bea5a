"""What a step costs one rank in computing: a fixed part, one per token and one per token squared.

    seconds = fixed + linear * sum(s) + quadratic * sum(s**2)        (s: lengths of its sequences)

Linear layers cost in proportion to the tokens, attention to the squared lengths; the optimizer and
the launching of kernels cost the same every step. The coefficients are given, derived from a FLOP
count and a rate, or fitted to timings (`fit`, `bert_unpad.costs.timing`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bert_unpad._balancer import WorkModel
from bert_unpad._cost_file import COST_FORMAT, read_cost
from bert_unpad._files import replacing
from bert_unpad.nn.config import BertConfig
from bert_unpad.nn.flops import flops_by_length, training_flops


@dataclass(frozen=True)
class ComputeCost:
    """Seconds that one rank computes in one step; the formula is in this module's docstring.

    Raises:
        ValueError: a coefficient is negative or not finite, or both rates are 0.
    """

    linear: float
    """Seconds per token."""
    quadratic: float = 0.0
    """Seconds per token squared."""
    fixed: float = 0.0
    """Seconds per step."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not (np.isfinite(value) and value >= 0):
                raise ValueError(f"{name}: expected seconds of 0 or more, got {value}")
        if self.linear == self.quadratic == 0:
            raise ValueError("linear, quadratic: expected at least one above 0")

    @classmethod
    def from_rate(
        cls, config: BertConfig, flops_per_second: float, longest: int = 512
    ) -> ComputeCost:
        """The cost of a model's floating-point operations, forward and backward, at a given rate.

        Args:
            config: the model.
            flops_per_second: what a rank sustains in training, not its peak.
            longest: tokens of the longest sequence; it matters where layers have windows.

        Raises:
            ValueError: the rate is not positive.
        """
        if not (np.isfinite(flops_per_second) and flops_per_second > 0):
            raise ValueError(f"flops_per_second: expected more than 0, got {flops_per_second}")
        linear, quadratic = flops_by_length(partial(training_flops, config), longest)
        return cls(linear / flops_per_second, quadratic / flops_per_second)

    @classmethod
    def fit(cls, batches: Sequence[ArrayLike], seconds: ArrayLike) -> ComputeCost:
        """The coefficients, none negative, that fit timed steps with the least relative error.

        Non-negative least squares on relative residuals, so that short steps count as much as long
        ones. With three unknowns the active set is found by trying all subsets.

        Args:
            batches: lengths of the sequences in each step, integers [B_i]; at least 3 steps of
                different kinds.
            seconds: [len(batches)], what each took.

        Raises:
            ValueError: the sizes do not fit together, there are fewer than 3 steps, or a time is
                not positive.
        """
        seconds = np.asarray(seconds, np.float64)
        if len(batches) < 3 or seconds.shape != (len(batches),):
            raise ValueError(
                f"seconds: expected one for each of 3 or more batches, got {len(batches)} batches "
                f"and {list(seconds.shape)} seconds"
            )
        if not (np.isfinite(seconds).all() and (seconds > 0).all()):
            raise ValueError("seconds: expected numbers above 0")
        sums = [_sums(lengths) for lengths in batches]
        terms = np.column_stack([np.array(sums), np.ones(len(batches))]) / seconds[:, None]
        scale = terms.max(axis=0)  # tokens, their squares and 1 differ by orders of magnitude
        best, least = None, np.inf
        for size in (1, 2, 3):
            for chosen in combinations(range(3), size):
                found, *_ = np.linalg.lstsq(
                    terms[:, chosen] / scale[list(chosen)], np.ones(len(batches)), rcond=None
                )
                if (found < 0).any() or not {0, 1} & set(chosen):
                    continue
                values = np.zeros(3)
                values[list(chosen)] = found / scale[list(chosen)]
                error = float(((terms @ values - 1) ** 2).sum())
                # A further term has to earn its place; rounding alone must not choose it.
                if error < least * (1 - 1e-9) and values[:2].any():
                    best, least = values, error
        if best is None:
            raise ValueError("seconds: expected times that grow with the tokens")
        return cls(*best.tolist())

    @property
    def work(self) -> WorkModel:
        """The part that depends on the sequences, as the balancer takes it."""
        return WorkModel(self.linear, self.quadratic)

    def seconds(self, lengths: ArrayLike) -> float:
        """Seconds of one step with sequences of these lengths, integers [B]."""
        tokens, squares = _sums(lengths)
        return self.fixed + self.linear * tokens + self.quadratic * squares

    def compare(
        self, batches: Sequence[ArrayLike], seconds: Sequence[float]
    ) -> list[dict[str, float]]:
        """Sequences, tokens, measured and fitted seconds of each timed step, see `fit`."""
        return [
            {
                "sequences": np.size(lengths),
                "tokens": int(np.sum(lengths)),
                "seconds": measured,
                "fitted": self.seconds(lengths),
            }
            for lengths, measured in zip(batches, seconds, strict=True)
        ]

    def save(self, path: str | os.PathLike[str], **about: object) -> None:
        """Writes a JSON file.

        Args:
            path: the file.
            about: what else to note in it, for example the model and the machine.

        Raises:
            OSError: the file cannot be written.
        """
        text = json.dumps({"format": COST_FORMAT, **asdict(self), **about}, indent=2) + "\n"
        with replacing(path) as temporary:
            temporary.write_text(text, "utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ComputeCost:
        """Reads what `save` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is no such file; the message names it.
        """
        values = read_cost(path)
        try:
            return cls(*values)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def _sums(lengths: ArrayLike) -> tuple[float, float]:
    sizes: NDArray[np.float64] = np.asarray(lengths, np.float64)
    return float(sizes.sum()), float((sizes**2).sum())
