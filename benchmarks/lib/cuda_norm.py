"""dropout_add_layer_norm on a GPU: the rows of BERT-base and BERT-large with 16,384 tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.lib.memory_bound import OURS, Case, Contender, by_autograd, compiled
from bert_unpad import ops

SHAPES, REHEARSALS = ((16384, 1024), (16384, 768)), ((32, 64), (32, 64))


def cases(device: str) -> Iterator[Case]:
    for shape in SHAPES if device == "cuda" else REHEARSALS:
        for p in (0.1, 0.0):
            yield _case(device, shape, p)


def _case(device: str, shape: tuple[int, int], p: float) -> Case:
    rows, hidden = shape
    x, residual, dy = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3))
    # fp32, as under mixed precision; PyTorch's LayerNorm takes its parameters in one dtype with x.
    weight, bias, x_bias = (torch.randn(hidden, device=device) for _ in range(3))
    inputs = (x, residual, weight, bias, x_bias)
    rng = torch.tensor([1, 2], device=device)

    def ours(p: float) -> Contender:
        def function(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, x_bias: Tensor):
            return ops.dropout_add_layer_norm(
                x, residual, weight, bias, dropout_p=p, eps=1e-12, x_bias=x_bias, rng=rng
            )

        return by_autograd(function, inputs, dy)

    def plain(p: float):
        def function(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, x_bias: Tensor):
            z = residual + functional.dropout(x + x_bias.to(x.dtype), p)
            return functional.layer_norm(z, (hidden,), weight.to(x.dtype), bias.to(x.dtype), 1e-12)

        return function

    def makers(p: float) -> dict:
        return {
            OURS: lambda: ours(p),
            "eager": lambda: by_autograd(plain(p), inputs, dy),
            "torch.compile": lambda: by_autograd(compiled(plain(p), device), inputs, dy),
        }

    size = x.numel() * x.element_size()
    return Case(
        f"dropout_add_layer_norm, dropout {p}, {rows} x {hidden}",
        # forward: x, residual -> y; backward: x, residual, dy -> dx, with dropout also dresidual
        {"forward": 3 * size, "backward": (5 if p else 4) * size},
        makers(p),
        by_autograd(plain(0.0), tuple(t.float() for t in inputs), dy.float()),
        makers(0.0) if p else {},
    )
