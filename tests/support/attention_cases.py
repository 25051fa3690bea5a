"""Attention with windows, grouped heads, positions and position biases, against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bert_unpad import ops
from tests.support import reference
from tests.support.op_checks import RNG, cu_seqlens

PARTS = ("table", "query", "key")


def random_positions(q_lengths: Sequence[int], k_lengths: Sequence[int]) -> Tensor:
    """Of each query among the keys of its sequence; sorted but for the last sequence."""
    rows = [
        torch.randint(max(keys, 1), (queries,)).sort().values
        for queries, keys in zip(q_lengths, k_lengths, strict=True)
    ]
    rows[-1] = rows[-1][torch.randperm(len(rows[-1]))]
    return torch.cat(rows).int()


def random_buckets(reach: int, count: int) -> Tensor:
    """Of distances up to `reach`, in no order."""
    buckets = torch.randint(count, (2 * reach + 1,)).int()
    buckets[-1] = count - 1
    return buckets


@dataclass
class Case:
    """Arguments of attention; without `q_lengths` those of self-attention."""

    k_lengths: Sequence[int]
    q_lengths: Sequence[int] | None = None
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 16
    window: tuple[int, int] = (-1, -1)
    p: float = 0.0
    scale: float | None = None
    positions: Tensor | None = None
    buckets: Tensor | None = None
    parts: Sequence[str] = ()
    device: str = "cpu"

    def inputs(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """q and kv, or qkv, and the parts of the position bias; fresh random numbers."""
        keys, queries = sum(self.k_lengths), sum(self.q_lengths or self.k_lengths)
        if self.q_lengths is None:
            shapes = {"qkv": (keys, self.heads + 2 * self.kv_heads, self.head_dim)}
        else:
            shapes = {
                "q": (queries, self.heads, self.head_dim),
                "kv": (keys, 2, self.kv_heads, self.head_dim),
            }
        count = 0 if self.buckets is None else int(self.buckets.max()) + 1
        rows = {"table": (count, self.heads)}
        rows |= {"query": (queries, self.heads, count), "key": (keys, self.heads, count)}
        shapes |= {name: rows[name] for name in self.parts}
        return {n: torch.randn(s, device=self.device).to(dtype) for n, s in shapes.items()}

    def ours(self, x: dict[str, Tensor]) -> Tensor:
        bias = None
        if self.buckets is not None:
            bias = ops.PositionBias(self.buckets, *(x.get(name) for name in PARTS))
        options = {"window": self.window, "position_bias": bias, "dropout_p": self.p}
        options |= {"scale": self.scale, "rng": RNG.to(self.device)}
        cu_k, longest = cu_seqlens(self.k_lengths, self.device), max(self.k_lengths, default=0)
        if self.q_lengths is None:
            return ops.varlen_attention(x["qkv"], cu_k, longest, num_heads=self.heads, **options)
        return ops.varlen_cross_attention(
            x["q"], x["kv"], cu_seqlens(self.q_lengths, self.device), cu_k,
            max(self.q_lengths, default=0), longest, query_positions=self.positions, **options,
        )  # fmt: skip

    def plain(self, x: dict[str, Tensor]) -> Tensor:
        bias = None
        if self.buckets is not None:
            bias = (self.buckets, *(x.get(name) for name in PARTS))
        options = {"window": self.window, "bias": bias}
        if self.q_lengths is None:
            return reference.varlen_attention(
                x["qkv"], self.k_lengths, self.p, RNG, self.scale, num_heads=self.heads, **options
            )
        return reference.varlen_cross_attention(
            x["q"], x["kv"], self.q_lengths, self.k_lengths, self.p, RNG, self.scale,
            positions=self.positions, **options,
        )  # fmt: skip


def with_gradients(function, inputs: dict[str, Tensor], dout: Tensor) -> list[Tensor]:
    """The function's result and the gradients of its inputs."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    out = function(leaves)
    out.backward(dout.to(out.dtype))
    return [
        out.detach(),
        *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves.values()),
    ]


def compare(case: Case, dtype: torch.dtype) -> None:
    """Holds result and gradients against the reference, on fresh random inputs."""
    inputs = case.inputs(dtype)
    queries = sum(case.q_lengths or case.k_lengths)
    dout = torch.randn(queries, case.heads, case.head_dim, device=case.device).to(dtype)

    def plain(precision: torch.dtype) -> list[Tensor]:
        wide = {name: x.to(precision) for name, x in inputs.items()}
        return [x.nan_to_num() for x in with_gradients(case.plain, wide, dout)]

    reference.assert_as_good_as_pytorch(
        lambda: with_gradients(case.ours, inputs, dout), plain, dtype, ["out", *inputs]
    )
