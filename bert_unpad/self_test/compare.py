"""Random inputs and the comparison with float64, for all cases of the self-test."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# Largest error allowed in each type. In 16 bits the largest seen on CPUs is about one eps of the
# type; a broken kernel is off by far more than four.
LIMITS = {
    torch.float32: 1e-5,
    torch.bfloat16: 4 * torch.finfo(torch.bfloat16).eps,
    torch.float16: 4 * torch.finfo(torch.float16).eps,
}
DROPOUT = 0.25  # kept elements count exactly 4 / 3


class Compared(NamedTuple):
    """One result: what it is, the operator's tensor, and the expected one in float64."""

    what: str
    got: Tensor
    expected: Tensor
    limit: float | None = None
    """The largest error allowed; None for that of the inputs' type."""


class Skip(Exception):
    """Raised if the device lacks something that the operator needs."""


class Inputs:
    """Draws a case's inputs.

    Attributes:
        device: device of the inputs.
        dtype: dtype of activations.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, generator: torch.Generator):
        self.device, self.dtype, self._generator = device, dtype, generator

    def normal(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(shape, generator=self._generator) * scale
        return drawn.to(self.device, dtype or self.dtype)

    def parameter(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Draws parameters, which are float32 for every dtype of activations."""
        return self.normal(*shape, dtype=torch.float32, scale=scale)

    def integers(self, below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, generator=self._generator).to(self.device)

    def rng(self) -> Tensor:
        return self.integers(2**62, 2)


Case = Callable[[Inputs], Iterator[Compared]]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """Registers a function as the case of the operator with the function's name."""
    CASES[function.__name__] = function
    return function


def compare(
    inputs: Inputs,
    ours: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    leaves: dict[str, Tensor],
    limit: float | None = None,
) -> Iterator[Compared]:
    """Yields results and gradients of `ours(*leaves)` and, in float64, of `plain(*leaves)`."""
    narrow = {name: x.detach().clone().requires_grad_() for name, x in leaves.items()}
    wide = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    got, expected = ours(*narrow.values()), plain(*wide.values())
    dout = inputs.normal(*expected.shape)
    got.backward(dout.to(got.dtype))
    expected.backward(dout.double())
    yield Compared("result", got, expected, limit)
    for name, x in wide.items():
        gradient = narrow[name].grad
        assert gradient is not None
        assert x.grad is not None
        yield Compared(f"gradient of {name}", gradient, x.grad, limit)


def check_dropout_rate(kept: Tensor) -> None:
    """Raises an ArithmeticError unless a mask of some thousand elements keeps about 1 - DROPOUT."""
    rate = kept.double().mean().item()
    if abs(rate - (1 - DROPOUT)) > 0.05:
        raise ArithmeticError(f"dropout: expected to keep {1 - DROPOUT}, kept {rate:.3f}")


def dropped(x: Tensor, kept: Tensor | None) -> Tensor:
    """Applies dropout with a mask to x; returns x without a mask."""
    return x if kept is None else x * kept / (1 - DROPOUT)


def relative_error(compared: Compared) -> float:
    """Returns the error relative to the largest expected value; NaN if a value is not finite."""
    got, expected = compared.got.detach().double(), compared.expected.detach().double()
    if got.shape != expected.shape:
        raise ArithmeticError(
            f"{compared.what}: expected shape {list(expected.shape)}, got {list(got.shape)}"
        )
    return ((got - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()
