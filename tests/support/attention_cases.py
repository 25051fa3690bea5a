"""Attention against the reference: arguments, and the kernels that a test runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from bert_unpad import ops
from tests.support import reference
from tests.support.backends import GPU, Backend
from tests.support.op_checks import RNG, cu_seqlens

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PARTS = ("table", "query", "key")
# Multiprocessors: with one, every batch fills the device and the fused backward kernel runs; with
# many, the two kernels that share a head's tiles.
FUSED, SPLIT = 1, 10_000
# Compute capabilities on which the kernels with mma.sync and those with wgmma run.
MMA, WGMMA = (10, 0), (9, 0)
MODELS = ("block", "ptx")


def kinds(*names: str, dtypes: Sequence[torch.dtype] = DTYPES) -> pytest.MarkDecorator:
    """Parametrizes a test by `dtype` and `kernels`, a fixture of tests/ops/conftest.py.

    Args:
        names: of a GPU's kernels: fused and split, with wgmma_ before it for those of Hopper, which
            take head_dim 64 and 128. A CPU, and fp32, have one kind.
    """
    cases = []
    for dtype in dtypes:
        for number, name in enumerate(names[:1] if dtype == torch.float32 else names):
            marks = GPU if number > 0 or name.startswith("wgmma") else ()
            label = f"{dtype}".removeprefix("torch.")
            cases.append(pytest.param(dtype, name, id=f"{label}-{name}", marks=marks))
    return pytest.mark.parametrize(("dtype", "kernels"), cases, indirect=["kernels"])


class Kernels:
    """Those that a test runs, by the name that `kinds` gives them."""

    def __init__(self, name: str, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fused, self.wgmma = name.endswith("fused"), name.startswith("wgmma")
        self.backend = backend
        backend.assume(
            multiprocessors=FUSED if self.fused else SPLIT, capability=WGMMA if self.wgmma else MMA
        )
        if backend.name == "cuda" and torch.cuda.get_device_capability() == WGMMA:
            monkeypatch.setenv("BERT_UNPAD_WGMMA", str(int(self.wgmma)))
        elif backend.name == "cuda" and self.wgmma:
            pytest.skip("has no kernels with wgmma")

    def heads(self, sequences: int, few: int = 2) -> int:
        """`few`, or on a GPU enough for a block on each multiprocessor where kernels are fused."""
        if self.backend.name != "cuda" or not self.fused:
            return few
        return -(-torch.cuda.get_device_properties().multi_processor_count // sequences)


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
    kv_heads: int | None = None
    head_dim: int = 64
    window: tuple[int, int] = (-1, -1)
    p: float = 0.0
    scale: float | None = None
    positions: Tensor | None = None
    buckets: Tensor | None = None
    parts: Sequence[str] = ()
    shift: float = 0.0
    """Added to all of the bias's table."""

    @property
    def queries(self) -> Sequence[int]:
        """The number of queries of each sequence."""
        return self.k_lengths if self.q_lengths is None else self.q_lengths

    def inputs(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """q and kv, or qkv, and the parts of the position bias; fresh random numbers."""
        keys, queries, kv_heads = (
            sum(self.k_lengths),
            sum(self.queries),
            self.kv_heads or self.heads,
        )
        if self.q_lengths is not None:
            shapes = {
                "q": (queries, self.heads, self.head_dim),
                "kv": (keys, 2, kv_heads, self.head_dim),
            }
        elif self.kv_heads is None:
            shapes = {"qkv": (keys, 3, self.heads, self.head_dim)}
        else:
            shapes = {"qkv": (keys, self.heads + 2 * kv_heads, self.head_dim)}
        count = 0 if self.buckets is None else int(self.buckets.max()) + 1
        rows = {"table": (count, self.heads)}
        rows |= {"query": (queries, self.heads, count), "key": (keys, self.heads, count)}
        shapes |= {name: rows[name] for name in self.parts}
        shifts = {"table": self.shift}
        return {
            name: (torch.randn(shape) + shifts.get(name, 0.0)).to(dtype)
            for name, shape in shapes.items()
        }

    def dout(self, dtype: torch.dtype) -> Tensor:
        return torch.randn(sum(self.queries), self.heads, self.head_dim).to(dtype)

    def _options(self, device: torch.device) -> dict[str, Any]:
        positions = None if self.positions is None else self.positions.to(device)
        options = {"window": self.window, "scale": self.scale, "rng": RNG.to(device)}
        return options | ({} if self.q_lengths is None else {"query_positions": positions})

    def ours(self, x: dict[str, Tensor], **more: Any) -> Tensor:
        """Of inputs on any device; `more` goes to the operator."""
        device = next(iter(x.values())).device
        options = self._options(device) | {"dropout_p": self.p} | more
        if self.buckets is not None:
            parts = (x.get(name) for name in PARTS)
            options["position_bias"] = ops.PositionBias(self.buckets.to(device), *parts)
        cu_k, longest = cu_seqlens(self.k_lengths, device), max(self.k_lengths, default=0)
        if self.q_lengths is None:
            options = {"batch": cu_k, "max_seqlen": longest} | options
            num_heads = None if self.kv_heads is None else self.heads
            return ops.varlen_attention(x["qkv"], num_heads=num_heads, **options)
        cu_q, most = cu_seqlens(self.q_lengths, device), max(self.q_lengths, default=0)
        return ops.varlen_cross_attention(x["q"], x["kv"], cu_q, cu_k, most, longest, **options)

    def plain(self, x: dict[str, Tensor]) -> Tensor:
        device = next(iter(x.values())).device
        options = self._options(device) | {"p": self.p}
        if self.buckets is not None:
            options["bias"] = (self.buckets.to(device), *(x.get(name) for name in PARTS))
        if self.q_lengths is None:
            num_heads = None if self.kv_heads is None else self.heads
            return reference.varlen_attention(
                x["qkv"], self.k_lengths, num_heads=num_heads, **options
            )
        options["positions"] = options.pop("query_positions")
        return reference.varlen_cross_attention(
            x["q"], x["kv"], self.q_lengths, self.k_lengths, **options
        )

    def bias_terms(self, name: str, x: dict[str, Tensor], dout: Tensor) -> Tensor | None:
        """The norms of what the gradient of a part of the bias is the sum of: score gradients of
        pairs, which are those of a query's or key's bias with a bucket for each distance."""
        reach, longest = len(self.buckets) // 2, max(0, *self.queries, *self.k_lengths)
        if longest > 5000:  # it takes a column for each distance
            return None
        far, positions = longest + reach, self.positions
        if positions is not None:  # no nearer than the reach from any token, as before
            positions = positions.clamp(-far, far)
        each = torch.arange(-far - longest, far + longest + 1).clamp(-reach, reach) + reach
        bucket = self.buckets[each].long().to(dout.device)
        wide = {name: t.double() for name, t in x.items()}
        wide |= {part: wide[part][..., bucket] for part in self.parts if part != "table"}
        if "table" in wide:
            wide["table"] = wide["table"][bucket]
        rows = torch.zeros(len(dout), self.heads, len(bucket), dtype=torch.float64)
        source = "query" if name == "table" else name
        leaf = wide.pop(source, rows.to(dout.device)).detach().requires_grad_()
        more = {"buckets": torch.arange(len(bucket)).int(), "positions": positions}
        Case(**vars(self) | more).plain(wide | {source: leaf}).backward(dout.double())
        squares = leaf.grad.nan_to_num().square()
        sums = squares.new_zeros(*squares.shape[:2], int(self.buckets.max()) + 1)
        sums.index_add_(2, bucket, squares)
        return sums.sum(0).sqrt().T[None] if name == "table" else sums.sqrt()[None]


def with_gradients(
    function: Callable[[dict[str, Tensor]], Tensor], inputs: dict[str, Tensor], dout: Tensor
) -> list[Tensor]:
    """The function's result and the gradients of its inputs."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    out = function(leaves)
    out.backward(dout.to(out.dtype))
    return [
        out.detach(),
        *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves.values()),
    ]


def compare(case: Case, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
    """Holds result and gradients against the reference, on fresh random inputs."""
    inputs = {name: x.to(device) for name, x in case.inputs(dtype).items()}
    dout = case.dout(dtype).to(device)

    def plain(precision: torch.dtype) -> list[Tensor]:
        wide = {name: x.to(precision) for name, x in inputs.items()}
        return [x.nan_to_num() for x in with_gradients(case.plain, wide, dout)]

    def terms(name: str) -> Tensor | None:
        return case.bias_terms(name, inputs, dout) if name in case.parts else None

    # Weights, output, score gradients and the result are rounded.
    reference.assert_as_good_as_pytorch(
        lambda: with_gradients(case.ours, inputs, dout), plain, dtype, ["out", *inputs],
        roundings=4, terms=terms,
    )  # fmt: skip
