"""bias_gelu on a GPU: BERT-large's intermediate layer with 16,384 tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.lib.memory_bound import OURS, Case, by_autograd, compiled
from bert_unpad import ops

SHAPE, REHEARSAL = (16384, 4096), (32, 64)


def cases(device: str) -> Iterator[Case]:
    for approximate in ("none", "tanh"):
        yield _case(device, approximate)


def _case(device: str, approximate: str) -> Case:
    rows, columns = SHAPE if device == "cuda" else REHEARSAL
    x, dy = (torch.randn(rows, columns, device=device, dtype=torch.bfloat16) for _ in range(2))
    bias = torch.randn(columns, device=device, dtype=torch.bfloat16)

    def plain(x: Tensor, bias: Tensor) -> Tensor:
        return functional.gelu(x + bias, approximate=approximate)

    def ours(x: Tensor, bias: Tensor) -> Tensor:
        return ops.bias_gelu(x, bias, approximate=approximate)

    size = x.numel() * x.element_size()
    return Case(
        f"bias_gelu, {'erf' if approximate == 'none' else approximate}, {rows} x {columns}",
        # forward: x -> y; backward: x, dy -> dx
        {"forward": 2 * size, "backward": 3 * size},
        {
            OURS: lambda: by_autograd(ours, (x, bias), dy),
            "eager": lambda: by_autograd(plain, (x, bias), dy),
            "torch.compile": lambda: by_autograd(compiled(plain, device), (x, bias), dy),
        },
        by_autograd(plain, (x.float(), bias.float()), dy.float()),
    )
