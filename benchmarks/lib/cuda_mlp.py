"""Linear layers on a GPU: BERT-large's projections and feed-forward half with 12,288 tokens.

48 sequences of Wikipedia's mean length. Weights are bf16 for all, so that nobody's casts count.
Algorithms are timed beforehand, as in training. Arithmetic limits these, not memory: of the columns
only the times compare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.lib import harness
from benchmarks.lib.memory_bound import OURS, Case, by_autograd, compiled
from bert_unpad import ops

TOKENS, HIDDEN, INNER = 12288, 1024, 4096
REHEARSAL = (32, 64, 128)


def cases(device: str) -> Iterator[Case]:
    tokens, hidden, inner = (TOKENS, HIDDEN, INNER) if device == "cuda" else REHEARSAL
    if device == "cuda":
        harness.time_algorithms()
    # queries, keys and values; attention's output; both linear layers of the feed-forward half
    for features, out in ((hidden, 3 * hidden), (hidden, hidden), (hidden, inner), (inner, hidden)):
        yield _case(
            f"linear, {tokens} x {features} -> {out}",
            device,
            ((tokens, features), (out, features), (out,)),
            (tokens, out),
            ops.linear,
            functional.linear,
        )
    shapes = ((tokens, hidden), (inner, hidden), (inner,), (hidden, inner))
    for form in ("none", "tanh"):

        def ours(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, form: str = form) -> Tensor:
            return ops.mlp(x, w1, b1, w2, approximate=form)[0]

        def plain(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, form: str = form) -> Tensor:
            inner = functional.gelu(functional.linear(x, w1, b1), approximate=form)
            return functional.linear(inner, w2)

        name = f"mlp, {'erf' if form == 'none' else form}, {tokens} x {hidden} x {inner}"
        yield _case(name, device, shapes, (tokens, hidden), ours, plain)


def _case(
    name: str,
    device: str,
    shapes: tuple[tuple[int, ...], ...],
    out_shape: tuple[int, int],
    ours: Callable[..., Tensor],
    plain: Callable[..., Tensor],
) -> Case:
    # Standard deviations of a trained layer's kind: results stay near 1.
    wide = [
        torch.randn(s, device=device) / (s[-1] ** 0.5 if i else 1) for i, s in enumerate(shapes)
    ]
    inputs = [t.bfloat16() for t in wide]
    dy = torch.randn(out_shape, device=device, dtype=torch.bfloat16)
    operands = sum(t.numel() for t in inputs) * 2
    size = dy.numel() * 2
    return Case(
        name,
        # operands and results once each
        {"forward": operands + size, "backward": 2 * operands + size},
        {
            OURS: lambda: by_autograd(ours, inputs, dy),
            "eager": lambda: by_autograd(plain, inputs, dy),
            "torch.compile": lambda: by_autograd(compiled(plain, device), inputs, dy),
        },
        by_autograd(plain, [t.float() for t in inputs], dy.float()),
    )
