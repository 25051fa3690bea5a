"""Variable-length attention on the model of a block."""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from gpu_model import build
from gpu_model.block_model import Model
from gpu_model.ptx import compiler
from tests.support import reference
from tests.support.backends import on_the_model
from tests.support.model_checks import DTYPES, Buffers, load_kernels

PART_ROWS = 256  # kBiasPartRows of csrc/attention/attention_cuda.h


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


def readable_part(monkeypatch: pytest.MonkeyPatch, part: Callable[[Tensor], Tensor]) -> None:
    """Kernels may read `part` of each tensor that they may only read, for the time of a test."""
    register = model().register

    def shortened(x: Tensor, writable: bool = True) -> Tensor:
        return register(x if writable else part(x), writable)

    monkeypatch.setattr(model(), "register", shortened)


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


def plan(
    sequences: int, heads: int, max_q: int, max_k: int, head_dim: int, sms: int, shared_bytes: int
) -> tuple[int, bool, int, int]:
    """Row tiles of the forward kernel; whether backward is fused; warps of the fused kernel and
    queries of its tiles, 0: it takes no such sequences."""
    out = torch.zeros(4, dtype=torch.int64)
    model().call("attention_plan", sequences, heads, max_q, max_k, head_dim, sms, shared_bytes, out)
    return int(out[0]), bool(out[1]), int(out[2]), int(out[3])


def wgmma_plan(
    sequences: int, tokens: int, heads: int, max_q: int, max_k: int, sms: int, shared_bytes: int
) -> tuple[bool, int, int, int]:
    """Of the backward pass with wgmma: whether it is fused, warpgroups and bytes of a block; then
    warpgroups of a block of the forward pass."""
    out = torch.zeros(4, dtype=torch.int64)
    sizes = (sequences, tokens, heads, max_q, max_k, sms, shared_bytes)
    model().call("attention_wgmma_plan", *sizes, out)
    return bool(out[0]), int(out[1]), int(out[2]), int(out[3])


def packed(x: Tensor) -> Packed:
    """[tokens, heads, head_dim], contiguous in the last dimension."""
    return Packed(x.data_ptr(), x.stride(0), x.stride(1))


def aligned(rows: Tensor) -> Tensor:
    """`rows`, or a copy where one of them begins elsewhere than at a multiple of 16 bytes."""
    size = rows.element_size()
    places = (rows.data_ptr(), rows.stride(0) * size, rows.stride(1) * size)
    return rows.clone() if any(place % 16 for place in places) else rows


class Call:
    """One call of an operator: what kernels get, and the tensors that they may touch."""

    def __init__(
        self, rows: Sequence[Tensor], cu: Sequence[Tensor], longest: Sequence[int], scale: float,
        dropout_p: float, rng: Tensor | None, order: Tensor | None, groups: Tensor | None,
        window: Sequence[int], positions: Tensor | None, bias: Sequence[Any],
    ) -> None:  # fmt: skip
        self.buffers, self.readable = Buffers(model()), set[int]()
        q, k, v = self.operands = rows
        bias = [*bias, *[None] * 4][:4]
        self.groups = [] if groups is None else groups.flatten().tolist()
        self.bias = dict(zip(("table", "query", "key"), bias[1:], strict=True))
        self.args = Args(
            dtype=DTYPES[q.dtype],
            heads=q.shape[1],
            kv_heads=k.shape[1],
            head_dim=q.shape[2],
            sequences=len(cu[0]) - 1,
            order_columns=1 if order is None or order.dim() == 1 else order.shape[1],
            q_tokens=q.shape[0],
            k_tokens=k.shape[0],
            max_q=longest[0],
            max_k=longest[1],
            scale=scale,
            keep_threshold=reference.keep_threshold(dropout_p),
            rng=self.read(rng if dropout_p else None),
            cu_q=self.read(cu[0]),
            cu_k=self.read(cu[1]),
            order=self.read(order),
            window_left=min(window[0], 2**32),
            window_right=min(window[1], 2**32),
            query_positions=self.read(positions),
            q=self.rows(q),
            k=self.rows(k),
            v=self.rows(v),
            bucket=self.read(bias[0]),
        )
        if bias[0] is None:
            return
        self.args.reach = len(bias[0]) // 2
        for name, x in self.bias.items():
            if x is None:
                continue
            self.args.buckets = x.shape[0] if name == "table" else x.shape[2]
            setattr(self.args, name, self.read(x) if name == "table" else self.rows(x))
        if self.bias["table"] is not None:
            self.args.distances = self.workspace(q.shape[1], len(bias[0]))

    def read(self, x: Tensor | None) -> int | None:
        """Registers all memory that a tensor is a view of; others may be too."""
        if x is None:
            return None
        storage = x.untyped_storage()
        if storage.data_ptr() not in self.readable:
            self.readable.add(storage.data_ptr())
            self.buffers.read(torch.empty(0, dtype=x.dtype).set_(storage))
        return x.data_ptr()

    def rows(self, x: Tensor) -> Packed:
        self.read(x)
        return packed(x)

    def workspace(self, *shape: int) -> int | None:
        return self.buffers.write(torch.empty(shape))

    def run(self, backward: bool) -> None:
        groups = (ctypes.c_int * len(self.groups))(*self.groups)
        model().call("attention", backward, ctypes.byref(self.args), groups, len(groups) // 3)

    def forward(self) -> tuple[Tensor, Tensor]:
        q = self.operands[0]
        out, lse = q.new_empty(q.shape), torch.empty(q.shape[1], q.shape[0])
        self.args.lse = self.buffers.write(lse)
        self.buffers.write(out)
        self.args.out_w = packed(out)
        self.run(False)
        return out, lse

    def backward(
        self, dout: Tensor, out: Tensor, lse: Tensor, gradients: Sequence[Tensor], table: bool
    ) -> list[Tensor]:
        """Writes dq, dk and dv; returns the gradients of the bias's table, query and key."""
        args, (q, *_) = self.args, self.operands
        args.out, args.dout = self.rows(aligned(out)), self.rows(aligned(dout))
        args.lse = self.read(lse)
        args.delta = self.workspace(*lse.shape)
        args.dq, args.dk, args.dv = map(packed, gradients)
        results = []
        for name, x in self.bias.items():
            result = q.new_empty(0) if x is None else torch.empty(x.shape, dtype=x.dtype)
            results.append(result)
            if x is None or (name == "table" and not table):
                continue
            setattr(args, f"d{name}", self.buffers.write(result))
            if name != "table":
                sums = getattr(args, f"d{name}") if x.dtype == torch.float32 else None
                setattr(args, f"d{name}_sums", sums or self.workspace(*x.shape))
        if table:
            parts = (-(-args.q_tokens // PART_ROWS), args.buckets, args.heads)
            args.dtable_parts = self.workspace(*parts)
            if self.bias["query"] is None:
                args.dquery_sums = self.workspace(args.q_tokens, args.heads, args.buckets)
        count = torch.zeros(1, dtype=torch.int64)
        model().call("attention_query_sums", ctypes.byref(args), count)
        if count:
            args.dq_sums = self.workspace(int(count))
        self.run(True)
        return results


def parts_of(qkv: Tensor, num_heads: int) -> Sequence[Tensor]:
    """q, k and v, [tokens, heads, head_dim]."""
    if num_heads == 0:
        return qkv.unbind(1)
    kv_heads = (qkv.shape[1] - num_heads) // 2
    return qkv.split([num_heads, kv_heads, kv_heads], 1)


@on_the_model(model)
def varlen_attention(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, dropout_p: float,
    rng: Tensor | None, order: Tensor | None = None, groups: Tensor | None = None,
    num_heads: int = 0, window_left: int = -1, window_right: int = -1, *bias: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return Call(
        parts_of(qkv, num_heads), [cu_seqlens] * 2, [max_seqlen] * 2, scale, dropout_p, rng, order,
        groups, (window_left, window_right), None, bias,
    ).forward()  # fmt: skip


@on_the_model(model)
def varlen_attention_backward(
    dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    scale: float, dropout_p: float, rng: Tensor | None, order: Tensor | None = None,
    groups: Tensor | None = None, num_heads: int = 0, window_left: int = -1,
    window_right: int = -1, *bias: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    call = Call(
        parts_of(qkv, num_heads), [cu_seqlens] * 2, [max_seqlen] * 2, scale, dropout_p, rng, order,
        groups, (window_left, window_right), None, bias,
    )  # fmt: skip
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype)
    call.buffers.write(dqkv)
    return dqkv, *call.backward(dout, out, lse, parts_of(dqkv, num_heads), any(bias[4:]))


@on_the_model(model)
def varlen_cross_attention(
    q: Tensor, kv: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scale: float,
    dropout_p: float, rng: Tensor | None, order: Tensor | None = None,
    groups: Tensor | None = None, window_left: int = -1, window_right: int = -1,
    positions: Tensor | None = None, *bias: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return Call(
        (q, *kv.unbind(1)), (cu_q, cu_k), (max_q, max_k), scale, dropout_p, rng, order, groups,
        (window_left, window_right), positions, bias,
    ).forward()  # fmt: skip


@on_the_model(model)
def varlen_cross_attention_backward(
    dout: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor, cu_k: Tensor,
    max_q: int, max_k: int, scale: float, dropout_p: float, rng: Tensor | None,
    order: Tensor | None = None, groups: Tensor | None = None, window_left: int = -1,
    window_right: int = -1, positions: Tensor | None = None, *bias: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    call = Call(
        (q, *kv.unbind(1)), (cu_q, cu_k), (max_q, max_k), scale, dropout_p, rng, order, groups,
        (window_left, window_right), positions, bias,
    )  # fmt: skip
    dq, dkv = torch.empty(q.shape, dtype=q.dtype), torch.empty(kv.shape, dtype=kv.dtype)
    for gradient in (dq, dkv):
        call.buffers.write(gradient)
    gradients = (dq, *dkv.unbind(1))
    return dq, dkv, *call.backward(dout, out, lse, gradients, any(bias[4:]))
