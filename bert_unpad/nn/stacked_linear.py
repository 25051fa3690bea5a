"""A linear layer that computes several of the same input."""

from collections.abc import Sequence

from torch import nn


class StackedLinear(nn.Linear):
    """Several linear layers of one input, whose weights and biases lie one above the other.

    For optimizers that treat a matrix as a whole, each stays a matrix of its own; see
    `optim.decay_groups`.

    Args:
        in_features: width of the input.
        rows: width of each layer's output.
        bias: whether they have biases.
    """

    def __init__(self, in_features: int, rows: Sequence[int], bias: bool = True) -> None:
        super().__init__(in_features, sum(rows), bias)
        self.stacked_rows = tuple(rows)
