"""masked_cross_entropy on a GPU: masked tokens of a batch of BERT, over its padded vocabulary.

Ours counts correct predictions as well, which the peers leave out.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.lib.memory_bound import OURS, Case, Contender, by_autograd, compiled

SHAPE, REHEARSAL = (3648, 30528), (16, 96)
IGNORE = -100


def cases(device: str) -> Iterator[Case]:
    rows, columns = SHAPE if device == "cuda" else REHEARSAL
    logits = (3 * torch.randn(rows, columns, device=device)).bfloat16()
    labels = torch.randint(columns, (rows,), device=device)
    dloss = torch.ones((), device=device)

    def on_floats(logits: Tensor) -> Tensor:
        return functional.cross_entropy(logits.float(), labels, reduction="sum")

    # Its result is a bf16 number, so its gradient is too.
    def as_it_is(logits: Tensor) -> Tensor:
        return functional.cross_entropy(logits, labels, reduction="sum")

    size = logits.numel() * logits.element_size()
    low = dloss.bfloat16()
    yield Case(
        f"masked_cross_entropy, {rows} x {columns}",
        # forward: logits; backward: logits -> dlogits
        {"forward": size, "backward": 2 * size},
        {
            OURS: lambda: _ours(logits, labels, dloss, inplace=False),
            f"{OURS}, in place": lambda: _ours(logits, labels, dloss, inplace=True),
            "eager, fp32": lambda: by_autograd(on_floats, [logits], dloss),
            "eager, bf16": lambda: by_autograd(as_it_is, [logits], low),
            "torch.compile, fp32": lambda: by_autograd(
                compiled(on_floats, device), [logits], dloss
            ),
            "torch.compile, bf16": lambda: by_autograd(compiled(as_it_is, device), [logits], low),
        },
        by_autograd(on_floats, [logits.float()], dloss),
    )


def _ours(logits: Tensor, labels: Tensor, dloss: Tensor, inplace: bool) -> Contender:
    """In place the gradient overwrites a copy of the logits: later rounds run on other numbers,
    which takes no other time."""
    op, tail = torch.ops.bert_unpad, (logits.shape[1], IGNORE)
    x = logits.clone() if inplace else logits

    def forward() -> tuple[Tensor, Tensor, Tensor]:
        return op.masked_cross_entropy(x, labels, *tail)

    def backward(saved: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
        arguments = (dloss, x, labels, saved[2], *tail)
        if not inplace:
            return [op.masked_cross_entropy_backward(*arguments)]
        op.masked_cross_entropy_backward_(*arguments)
        return [x]

    return Contender(forward, backward)
