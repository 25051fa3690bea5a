"""A small module with all that a sharded update may meet, and data for it."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from bert_unpad.nn.stacked_linear import StackedLinear
from tests.support.seeds import derived

WORDS, WIDTH = 11, 7


class Inner(nn.Module):
    """Uses the parameters of a child that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = StackedLinear(WIDTH, (6, 4, 3))
        self.out = nn.Linear(13, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.linear(x, self.dense.weight, self.dense.bias)
        return x + self.out(y.tanh())


class Net(nn.Module):
    """Tied weights, a frozen layer, one that is not always used, and sizes that no rank divides."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Inner() for _ in range(3))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.zeros(WORDS))

    def forward(self, ids: Tensor, spare: bool = True) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        x = self.frozen(x)
        x = self.spare(x) if spare else x
        return functional.linear(x, self.words.weight, self.bias)


def net(seed: int = 0) -> Net:
    torch.manual_seed(derived(seed))
    return Net()


def batch(rank: int, step: int, part: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(derived(1000 * rank + 10 * step + part))
    return torch.randint(WORDS, (6,), generator=generator)


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return functional.cross_entropy(logits, ids.roll(1)) * 5.0
