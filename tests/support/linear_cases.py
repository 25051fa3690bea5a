"""What the tests of linear layers and of the feed-forward half share."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.seeds import derived


def leaves(tensors: list[Tensor | None], dtype: torch.dtype | None = None) -> list[Tensor | None]:
    """Copies that want gradients, in `dtype` or as they are."""
    return [
        None if t is None else t.detach().to(dtype or t.dtype, copy=True).requires_grad_()
        for t in tensors
    ]


def gradients(outputs: tuple[Tensor, ...], douts: list[Tensor], inputs: list[Tensor | None]):
    torch.autograd.backward(outputs, [d.to(o.dtype) for d, o in zip(douts, outputs, strict=True)])
    return [*(o.detach() for o in outputs), *(t.grad for t in inputs if t is not None)]


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """In x's dtype, as autocast has it."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def draw(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(derived(seed))
    return [torch.randn(shape, generator=generator) for shape in shapes]
