"""Runs the CUDA attention kernels on the model of a block, on torch CPU tensors."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from gpu_model import build
from gpu_model.block_model import Model
from gpu_model.ptx import compiler
from tests.support import reference
from tests.support.attention_cases import PARTS
from tests.support.model_checks import DTYPES, load_kernels
from tests.support.op_checks import RNG, cu_seqlens

NAMES = ["out", "dq", "dk", "dv"]
PART_ROWS = 256  # kBiasPartRows of csrc/attention/attention_cuda.h
# Multiprocessors: with one, every batch fills the device and the fused backward kernel runs; with
# many, the two kernels that share a head's tiles.
FUSED, SPLIT = 1, 10_000
# Compute capabilities on which the kernels with mma.sync and those with wgmma run.
MMA, WGMMA = (10, 0), (9, 0)


class Packed(ctypes.Structure):
    _fields_ = (
        ("p", ctypes.c_void_p),
        ("token_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
    )


class Args(ctypes.Structure):
    """AttentionCudaParams and AttentionCudaBias of csrc/attention/attention_cuda.h."""

    _fields_ = (
        *(
            (name, ctypes.c_int)
            for name in ("dtype", "heads", "kv_heads", "head_dim", "sequences", "order_columns")
        ),
        *((name, ctypes.c_int64) for name in ("q_tokens", "k_tokens")),
        *((name, ctypes.c_int) for name in ("max_q", "max_k")),
        ("scale", ctypes.c_float),
        ("keep_threshold", ctypes.c_uint32),
        *((name, ctypes.c_void_p) for name in ("rng", "cu_q", "cu_k", "order")),
        *((name, ctypes.c_int64) for name in ("window_left", "window_right")),
        ("query_positions", ctypes.c_void_p),
        *((name, Packed) for name in ("q", "k", "v", "out", "dout")),
        *((name, Packed) for name in ("out_w", "dq", "dk", "dv")),
        *((name, ctypes.c_void_p) for name in ("lse", "delta", "dq_sums")),
        # AttentionCudaBias
        *((name, ctypes.c_int) for name in ("buckets", "reach")),
        *((name, ctypes.c_void_p) for name in ("bucket", "table", "distances")),
        *((name, Packed) for name in ("query", "key")),
        *((name, ctypes.c_void_p) for name in ("dtable", "dquery", "dkey")),
        *((name, ctypes.c_void_p) for name in ("dquery_sums", "dkey_sums", "dtable_parts")),
    )


@cache
def model() -> Model:
    """The kernels' library; compiled on first use."""
    return load_kernels("attention", "attention_args_size", Args)


def ptx_of(arch: str, *names: str) -> dict[str, str]:
    """The PTX of sources in csrc, by file name. Skips the test where there is no nvcc.

    Args:
        arch: compute capability, as nvcc names it.
        names: such as `attention/attention_d64`.
    """
    if compiler.nvcc() is None:
        pytest.skip("needs nvcc")
    sources = [build.CSRC / f"{name}.cu" for name in names]
    return {source.name: compiler.ptx(source, arch) for source in sources}


def packed(x: Tensor) -> Packed:
    """[tokens, heads, head_dim], contiguous in the last dimension."""
    return Packed(x.data_ptr(), x.stride(0), x.stride(1))


def nans(*shape: int) -> Tensor:
    return torch.full(shape, math.nan)


def bias_workspaces(
    bias: Sequence[Tensor | None], results: dict[str, Tensor], heads: int, tokens: int
) -> dict[str, Tensor]:
    """What the binding allocates beside the results, by field of Args."""
    buckets, table, *rows = bias
    work = {} if table is None else {"distances": nans(heads, len(buckets))}
    for name, x in zip(("dquery", "dkey"), rows, strict=True):
        if name in results:
            gradient = results[name]
            work[f"{name}_sums"] = gradient if x.dtype == torch.float32 else nans(*x.shape)
    if "dtable" in results:
        count = len(table)
        work["dtable_parts"] = nans(-(-tokens // PART_ROWS), count, heads)
        work.setdefault("dquery_sums", nans(tokens, heads, count))
    return work


def query_sums(args: Args) -> Tensor:
    """The fused backward kernel's workspace; empty where it needs none."""
    count = torch.zeros(1, dtype=torch.int64)
    model().call("attention_query_sums", ctypes.byref(args), count)
    return nans(int(count))


def plan(
    sequences: int, heads: int, max_q: int, max_k: int, head_dim: int, sms: int, shared_bytes: int
) -> tuple[int, bool, int, int]:
    """Row tiles of the forward kernel; whether backward is fused; warps of the fused kernel and
    queries of its tiles, 0: it takes no such sequences."""
    out = torch.zeros(4, dtype=torch.int64)
    model().call("attention_plan", sequences, heads, max_q, max_k, head_dim, sms, shared_bytes, out)
    return int(out[0]), bool(out[1]), int(out[2]), int(out[3])


def wgmma_plan(
    sequences: int, heads: int, max_q: int, max_k: int, sms: int, shared_bytes: int
) -> tuple[bool, int, int]:
    """Of the backward pass with wgmma: whether it is fused, warpgroups and bytes of a block."""
    out = torch.zeros(3, dtype=torch.int64)
    model().call("attention_wgmma_plan", sequences, heads, max_q, max_k, sms, shared_bytes, out)
    return bool(out[0]), int(out[1]), int(out[2])


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None,
    q_lengths: Sequence[int],
    k_lengths: Sequence[int],
    *,
    p: float = 0.0,
    rng: Tensor | None = None,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    positions: Tensor | None = None,
    bias: Sequence[Tensor | None] | None = None,
    order: Sequence[int] | Sequence[Sequence[int]] | None = None,
    groups: Sequence[tuple[int, int, int]] = (),
    max_seqlen: int | None = None,
    cu: tuple[Tensor, Tensor] | None = None,
    backward_order: Sequence[Sequence[int]] | None = None,
) -> dict[str, Tensor]:
    """out and lse; with `dout` dq, dk, dv too. Operands may be strided views.

    bias: buckets, table, query, key, whose gradients are dtable, dquery and dkey. Results begin as
    NaN, so what a kernel leaves out shows. A wrong `cu`, and a wrong `backward_order` in the place
    of `order`, can be given on purpose.
    """
    kernels = model()
    heads, head_dim = q.shape[1:]
    cu_q, cu_k = cu or (cu_seqlens(q_lengths), cu_seqlens(k_lengths))
    longest = [
        max(n, default=0) if max_seqlen is None else max_seqlen for n in (q_lengths, k_lengths)
    ]
    results = {
        "out": torch.full(q.shape, math.nan, dtype=q.dtype),
        "lse": torch.full((heads, q.shape[0]), math.nan),
    }
    if dout is not None:
        for name, x in (("dq", q), ("dk", k), ("dv", v)):
            results[name] = torch.full(x.shape, math.nan, dtype=x.dtype)
    delta = torch.full((heads, q.shape[0]), math.nan)
    buckets, *parts = bias or [None] * 4
    parts = {name: x for name, x in zip(PARTS, parts, strict=True) if x is not None}
    if dout is not None:
        results |= {f"d{n}": nans(*x.shape).to(x.dtype) for n, x in parts.items()}
    work = bias_workspaces(bias, results, heads, q.shape[0]) if bias else {}
    rng = None if p == 0.0 else rng
    order_t = None if order is None else torch.tensor(order, dtype=torch.int32)

    kernels.clear()
    rows = (q, k, v, dout, *parts.values())
    bases = {x.untyped_storage().data_ptr(): x for x in rows if x is not None}
    for x in bases.values():
        whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
        kernels.register(whole, writable=False)
    small = (cu_q, cu_k, rng, order_t, positions, buckets)
    small = {x.data_ptr(): x for x in small if x is not None}
    for x in small.values():
        kernels.register(x, writable=False)
    for x in {id(x): x for x in (*results.values(), delta, *work.values())}.values():
        kernels.register(x)

    args = Args(
        dtype=DTYPES[q.dtype],
        heads=heads,
        kv_heads=k.shape[1],
        head_dim=head_dim,
        sequences=len(q_lengths),
        order_columns=1 if order_t is None or order_t.dim() == 1 else order_t.shape[1],
        q_tokens=q.shape[0],
        k_tokens=k.shape[0],
        max_q=longest[0],
        max_k=longest[1],
        scale=1.0 / math.sqrt(head_dim) if scale is None else scale,
        keep_threshold=reference.keep_threshold(p),
        rng=None if rng is None else rng.data_ptr(),
        cu_q=cu_q.data_ptr(),
        cu_k=cu_k.data_ptr(),
        order=None if order_t is None else order_t.data_ptr(),
        window_left=window[0],
        window_right=window[1],
        query_positions=None if positions is None else positions.data_ptr(),
        q=packed(q),
        k=packed(k),
        v=packed(v),
        out_w=packed(results["out"]),
        lse=results["lse"].data_ptr(),
        delta=delta.data_ptr(),
    )
    if buckets is not None:
        args.reach, args.bucket = len(buckets) // 2, buckets.data_ptr()
        for name, x in parts.items():
            args.buckets = x.shape[0] if name == "table" else x.shape[2]
            setattr(args, name, x.data_ptr() if name == "table" else packed(x))
        for name, x in work.items():
            setattr(args, name, x.data_ptr())
    flat = [number for group in groups for number in group]
    group_array = (ctypes.c_int * len(flat))(*flat)
    kernels.call("attention", False, ctypes.byref(args), group_array, len(groups))
    if dout is not None:
        if backward_order is not None:
            order_t.copy_(torch.tensor(backward_order))
        args.out, args.dout = packed(results["out"]), packed(dout)
        for name in ("dq", "dk", "dv"):
            setattr(args, name, packed(results[name]))
        for name in parts:
            setattr(args, f"d{name}", results[f"d{name}"].data_ptr())
        sums = query_sums(args)
        if sums.numel() > 0:
            kernels.register(sums)
            args.dq_sums = sums.data_ptr()
        kernels.call("attention", True, ctypes.byref(args), group_array, len(groups))
    return results


def compare(
    dtype: torch.dtype,
    q_lengths: Sequence[int],
    k_lengths: Sequence[int] | None = None,
    *,
    heads: int = 2,
    kv_heads: int | None = None,
    head_dim: int = 64,
    p: float = 0.0,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    positions: Tensor | None = None,
    buckets: Tensor | None = None,
    parts: Sequence[str] = (),
) -> None:
    """Holds the kernels' results against the reference, on fresh random inputs.

    parts: those of the position bias, of which `buckets` are the buckets.
    """
    k_lengths = q_lengths if k_lengths is None else k_lengths
    q, dout = (torch.randn(sum(q_lengths), heads, head_dim).to(dtype) for _ in range(2))
    kv = torch.randn(sum(k_lengths), 2, kv_heads or heads, head_dim).to(dtype)
    options = {"scale": scale, "window": window, "positions": positions}
    names = [*NAMES, *(f"d{name}" for name in parts)]
    terms = bias_terms(dtype, q, kv, buckets, parts)

    def summed(name: str) -> Tensor | None:
        """The norm of what the gradient of the table is the sum of: score gradients of pairs."""
        far = max(*q_lengths, *k_lengths, *([] if positions is None else positions.tolist()))
        if name != "dtable" or far > 5000:  # it takes a column for each distance
            return None
        reach = len(buckets) // 2
        each = torch.arange(-far, far + 1).clamp(-reach, reach) + reach
        bucket = buckets[each].long()
        alone = {n: x.double()[..., bucket] for n, x in terms.items() if n != "table"}
        zeros = torch.zeros(q.shape[0], heads, len(bucket), dtype=torch.float64)
        query = alone.get("query", zeros).requires_grad_()
        table = terms["table"].double()[bucket]
        bias = torch.arange(len(bucket)).int(), table, query, alone.get("key")
        out = reference.varlen_cross_attention(
            q.double(), kv.double(), q_lengths, k_lengths, p, RNG, bias=bias, **options
        )
        out.backward(dout.double())
        squares = query.grad.nan_to_num().square().sum(0)
        sums = torch.zeros(heads, len(terms["table"]), dtype=torch.float64)
        return sums.index_add(1, bucket, squares).sqrt().T[None]

    def ours() -> list[Tensor]:
        k, v = kv.unbind(1)
        bias = None if buckets is None else (buckets, *(terms.get(name) for name in PARTS))
        results = attention(q, k, v, dout, q_lengths, k_lengths, p=p, rng=RNG, bias=bias, **options)
        return [results[name] for name in names]

    def plain(precision: torch.dtype) -> list[Tensor]:
        a, b = (x.to(precision, copy=True).requires_grad_() for x in (q, kv))
        wide = {name: x.to(precision, copy=True).requires_grad_() for name, x in terms.items()}
        bias = None if buckets is None else (buckets, *(wide.get(name) for name in PARTS))
        out = reference.varlen_cross_attention(
            a, b, q_lengths, k_lengths, p, RNG, bias=bias, **options
        )
        out.backward(dout.to(precision))
        gradients = (a.grad, *b.grad.unbind(1), *(wide[name].grad for name in parts))
        return [x.nan_to_num() for x in (out.detach(), *gradients)]

    # Weights, output, score gradients and the result are rounded.
    reference.assert_as_good_as_pytorch(ours, plain, dtype, names, roundings=4, terms=summed)


def bias_terms(
    dtype: torch.dtype, q: Tensor, kv: Tensor, buckets: Tensor | None, parts: Sequence[str]
) -> dict[str, Tensor]:
    """Random parts of a position bias for q and kv; the table in fp32, as the kernels take it."""
    count, heads = 0 if buckets is None else int(buckets.max()) + 1, q.shape[1]
    rows = {"query": (q.shape[0], heads, count), "key": (kv.shape[0], heads, count)}
    terms = {name: torch.randn(rows[name]).to(dtype) for name in parts if name != "table"}
    if "table" in parts:
        terms["table"] = torch.randn(count, heads).to(dtype).float()
    return terms
