"""The launches of csrc/attention for a batch, for the model of an SM: what attention.cu and
launch_head_dim.h start, with which parameters. bf16, no windows, as many heads of keys as of
queries."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gpu_model.sm.architectures import Architecture
from gpu_model.sm.kernel import Kernel, Launch, Stage
from gpu_model.sm.state import Memory

# Lengths that share their last rows' or keys' group of this many are one kind of block: warps skip
# by 16.
QUANTUM = 32
BF16 = 1  # DType::kBFloat16


class _Packed(ctypes.Structure):
    _fields_ = (
        ("p", ctypes.c_void_p),
        ("token_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
    )


class _Launch(ctypes.Structure):
    """AttentionLaunch of csrc/attention/kernel_parts.h; kernel.py checks its size."""

    _fields_ = (
        *(
            (n, ctypes.c_int)
            for n in ("dtype", "heads", "kv_heads", "head_dim", "sequences", "order_columns")
        ),
        *((n, ctypes.c_int64) for n in ("q_tokens", "k_tokens")),
        *((n, ctypes.c_int) for n in ("max_q", "max_k")),
        ("scale", ctypes.c_float),
        ("keep_threshold", ctypes.c_uint32),
        *((n, ctypes.c_void_p) for n in ("rng", "cu_q", "cu_k", "order")),
        *((n, ctypes.c_int64) for n in ("window_left", "window_right")),
        ("query_positions", ctypes.c_void_p),
        *((n, _Packed) for n in ("q", "k", "v", "out", "dout", "out_w", "dq", "dk", "dv")),
        *((n, ctypes.c_void_p) for n in ("lse", "delta", "dq_sums")),
        *((n, ctypes.c_int) for n in ("first", "tiles", "group")),
        *((n, ctypes.c_float) for n in ("unit", "keep")),
    )


class _BiasLaunch(_Launch):
    """AttentionBiasLaunch: with an AttentionCudaBias of csrc/attention/attention_cuda.h."""

    _fields_ = (
        *((n, ctypes.c_int) for n in ("buckets", "reach")),
        *((n, ctypes.c_void_p) for n in ("bucket", "table", "distances")),
        *((n, _Packed) for n in ("bias_query", "bias_key")),
        *((n, ctypes.c_void_p) for n in ("dtable", "dbias_query", "dbias_key")),
        *((n, ctypes.c_void_p) for n in ("dquery_sums", "dkey_sums", "dtable_parts")),
        ("first_column", ctypes.c_int),
    )


# Bytes of a warp: a GradientTile of so many columns (csrc/attention/score_bias.h), a DistanceStrip
# for tiles of 64 columns, and numbers by distance (table_bias.h).
STRIP, DISTANCES = 4 * 80, 4 * 272
GRADIENT_TILE = {16: 16 * (4 * 16 + 80) + 64, 64: 16 * (4 * 64 + 96) + 64}


def address(number: int) -> int:
    """Where the device memory of an operand begins: far from that of others."""
    return 0x7F00_0000_0000 + (number << 34)


@dataclass(frozen=True)
class Batch:
    """Sequences of these lengths, and how a call launches them: in `order`, whose parts `groups`
    (sequences, longest) are launched side by side; all at once without."""

    lengths: tuple[int, ...]
    heads: int = 16
    head_dim: int = 64
    order: tuple[int, ...] = ()
    groups: tuple[tuple[int, int], ...] = ()
    window: int = -1
    """Keys on each side that a query sees; -1: all."""
    buckets: tuple[int, ...] = ()
    """Of a position bias that is a table by distance, which gets a gradient: of the distances from
    -reach to reach; empty: no bias."""

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def cu_seqlens(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)

    @property
    def products(self) -> int:
        """Multiply-adds, times two, of one product of all queries with their keys."""
        return 2 * sum(n * n for n in self.lengths) * self.heads * self.head_dim

    @property
    def runs(self) -> list[tuple[int, tuple[int, ...], int]]:
        """(first, sequences, longest) of each launch."""
        order = self.order or tuple(range(len(self.lengths)))
        groups = self.groups or ((len(order), max(self.lengths, default=0)),)
        first, found = 0, []
        for count, longest in groups:
            found.append((first, order[first : first + count], longest))
            first += count
        return found


def forward_row_tiles(max_q: int, head_dim: int) -> int:
    """The function of that name of csrc/attention/choice.h."""
    return 2 if head_dim == 64 and max_q > 64 else 1


def backward_tile(head_dim: int) -> int:
    """Rows of a tile of queries, or, for dQ, of keys: kBackwardQueries and QueryGradientKeys."""
    return 32 if head_dim == 128 else 64


def backward_shared(head_dim: int, warps: int, fused: bool, tile: int, max_q: int) -> int:
    """BackwardShared::bytes of csrc/attention/backward_fused.h."""
    keys, row = 32 * warps if fused else 0, 2 * head_dim
    rows = -(-max_q // tile) * tile if fused else 2 * tile
    return 4 * tile * row + keys * (row + 2 * tile) + 8 * rows


def fused_shape(batch: Batch, longest: int, architecture: Architecture) -> tuple[int, int]:
    """The function of that name of csrc/attention/choice.h, for a launch of sequences up to
    `longest`: warps and queries of a tile."""
    d, room = batch.head_dim, architecture.block_shared
    if longest > 1024 or d > 64:
        return 0, 0
    four, eight, small = (
        backward_shared(d, warps, True, tile, longest)
        for warps, tile in ((4, 64), (8, 64), (4, 32))
    )
    if d == 32:
        return (4, 64) if four <= room else (0, 0)
    pairs = {size: 2 * (size + 1024) <= room + 1024 for size in (four, small)}
    if longest > 128 and eight <= room:
        blocks, sms = len(batch.lengths) * batch.heads, architecture.sms
        if not pairs[four] or 9 * -(-blocks // sms) < 16 * -(-blocks // (2 * sms)):
            return 8, 64
    if pairs[four] or (four <= room and not pairs[small]):
        return 4, 64
    return (4, 32) if small <= room else (0, 0)


def backward_is_fused(batch: Batch, architecture: Architecture) -> bool:
    """The function of that name of csrc/attention/choice.h."""
    return (
        len(batch.lengths) * batch.heads >= architecture.sms
        and fused_shape(batch, max(batch.lengths, default=0), architecture)[0] > 0
    )


def kernel_name(name: str, *arguments: int | bool, bias: bool = False) -> str:
    """The mangled name of a kernel template for bf16, with a position bias or without."""
    values = "".join(f"L{'b' if isinstance(a, bool) else 'i'}{int(a)}E" for a in arguments)
    parameter = f"T{len(arguments)}_"  # the kernel's own: of the type of the last argument
    launch = "19AttentionBiasLaunch" if bias else "15AttentionLaunch"
    return f"_ZN10bert_unpad{len(name)}{name}INS_4bf16E{values}NS_{launch}EEEv{parameter}"


def _parameters(
    batch: Batch, dropout_p: float, first: int, longest: int, tiles: int
) -> tuple[bytes, Memory]:
    h, d, tokens = batch.heads, batch.head_dim, batch.tokens

    def packed(number: int, width: int) -> _Packed:
        return _Packed(address(number), width * h * d, d)

    keep = 65536 - round(65536 * dropout_p)
    cu, order = address(1), address(2)
    values = (
        *(BF16, h, h, d, len(batch.lengths), 4, tokens, tokens, longest, longest, 1 / math.sqrt(d)),
        *(keep, address(3) if dropout_p else None, cu, cu, order if batch.order else None),
        *(
            batch.window,
            batch.window,
            None,
            packed(4, 3),
            packed(5, 3),
            packed(6, 3),
            packed(7, 1),
            packed(8, 1),
        ),
        *(packed(9, 1), packed(10, 3), packed(11, 3), packed(12, 3), address(13), address(14)),
        *(address(15), first, tiles, 1),
        *(math.log2(math.e) / math.sqrt(d), 65536 / keep if keep else 0.0),
    )
    regions = {cu: batch.cu_seqlens}
    if batch.order:
        starts, lengths = batch.cu_seqlens[list(batch.order)], np.array(batch.lengths)
        rows = (batch.order, starts, lengths[list(batch.order)], np.zeros_like(starts))
        regions[order] = np.stack(rows, 1).astype(np.int32).ravel()
    if not batch.buckets:
        return bytes(_Launch(*values)), Memory(regions)
    bucket, rows = address(16), _Packed()
    regions[bucket] = np.array(batch.buckets, np.int32)
    bias = (
        *(max(batch.buckets) + 1, len(batch.buckets) // 2),
        *(bucket, address(17), address(18), rows, rows, address(19), None, None),
        *(address(20), None, address(21)),
    )
    return bytes(_BiasLaunch(*values, *bias)), Memory(regions)


def _kinds(batch: Batch, sequences: Sequence[int], tiles: int, rows: int) -> list[tuple[int, ...]]:
    """Of blocks that take `rows` rows of a head each (0 = all): groups of their rows and of keys,
    whether the sequence's number has to be loaded first, and whether what was loaded is checked;
    with a window also how near the sequence's ends they are."""
    found = []
    for sequence in sequences:
        length = batch.lengths[sequence]
        for head in range(batch.heads):
            for tile in range(tiles):
                mine = length if rows == 0 else min(max(length - rows * tile, 0), rows)
                keys = -(-length // QUANTUM) if mine else 0
                checks = bool(batch.order) and tile == head == 0
                kind = (-(-mine // QUANTUM), keys, bool(batch.order), checks)
                if batch.window >= 0 and rows:
                    after, near = (length - 1) // rows - tile, 1 + batch.window // rows
                    kind += (min(tile, near), min(after, near))
                found.append(kind)
    return found


def launch_of(
    available: Mapping[str, Kernel],
    batch: Batch,
    dropout_p: float,
    name: str,
    threads: int,
    shared: int,
    run: tuple[int, tuple[int, ...], int],
    rows: int,
) -> Launch:
    first, sequences, longest = run
    tiles = 1 if rows == 0 else -(-longest // rows)
    parameters, memory = _parameters(batch, dropout_p, first, longest, tiles)
    if name not in available:
        raise ValueError(f"kernels: expected {name}, which these launches need")
    blocks = len(sequences) * batch.heads * tiles
    kinds = _kinds(batch, sequences, tiles, rows)
    return Launch(available[name], (blocks, 1, 1), threads, shared, parameters, kinds, memory)


def forward(available: Mapping[str, Kernel], batch: Batch, dropout_p: float) -> list[Stage]:
    """The launches of a forward pass. Bytes: q, k, v and out, and lse."""
    d, launches = batch.head_dim, []
    shared = (5 if d <= 64 else 4) * 64 * 2 * d  # KeyTiles::kSharedBytes
    for run in batch.runs:
        row_tiles = forward_row_tiles(run[2], d)
        name = kernel_name("attention_forward_kernel", d, row_tiles, dropout_p > 0, False)
        launches.append(
            launch_of(available, batch, dropout_p, name, 128, shared, run, 64 * row_tiles)
        )
    return [Stage("forward", launches, batch.tokens * batch.heads * (4 * 2 * d + 4))]


def backward(
    available: Mapping[str, Kernel],
    batch: Batch,
    dropout_p: float,
    architecture: Architecture,
) -> list[Stage]:
    """The launches of a backward pass. Bytes: q, k, v, out, dout and their gradients but out's,
    and lse; not fused, q, k, v and dout twice, and delta. Fused with several passes over the keys,
    also the sums of dQ after each but the last; they are read while L2 still has them."""
    if batch.buckets:
        return _bias_backward(available, batch, dropout_p)
    d, fused = batch.head_dim, backward_is_fused(batch, architecture)
    rows = batch.tokens * batch.heads
    dropout = dropout_p > 0
    if fused:
        launches, sums = [], 0
        for run in batch.runs:
            warps, tile = fused_shape(batch, run[2], architecture)
            lengths = [batch.lengths[sequence] for sequence in run[1]]
            sums += sum(n * max(-(-n // (32 * warps)) - 1, 0) for n in lengths) * batch.heads
            name = kernel_name("attention_backward_kernel", d, warps, dropout, True, False, tile)
            shared = backward_shared(d, warps, True, tile, run[2])
            launches.append(
                launch_of(available, batch, dropout_p, name, 32 * warps, shared, run, 0)
            )
        return [Stage("backward", launches, rows * (8 * 2 * d + 4) + sums * 4 * d)]
    queries, keys = [], []
    for run in batch.runs:
        name = kernel_name("attention_backward_dq_kernel", d, dropout, False)
        shared = 4 * backward_tile(d) * 2 * d
        queries.append(launch_of(available, batch, dropout_p, name, 128, shared, run, 64))
        tile = backward_tile(d)
        name = kernel_name("attention_backward_kernel", d, 4, dropout, False, False, tile)
        shared = backward_shared(d, 4, False, tile, run[2])
        keys.append(launch_of(available, batch, dropout_p, name, 128, shared, run, 64))
    return split_stages(batch, queries, keys)


def _bias_backward(available: Mapping[str, Kernel], batch: Batch, dropout_p: float) -> list[Stage]:
    """What launch_bias.h starts, for head dimensions up to 64."""
    d, tile, queries, keys = batch.head_dim, backward_tile(batch.head_dim), [], []
    of_queries, of_keys = bias_kernel_names(d)
    of_warps = 4 * (GRADIENT_TILE[16] + STRIP)
    for run in batch.runs:
        shared = 4 * tile * 2 * d + of_warps + 5 * DISTANCES
        queries.append(launch_of(available, batch, dropout_p, of_queries, 128, shared, run, 64))
        shared = backward_shared(d, 4, False, tile, run[2]) + of_warps + 4 * DISTANCES
        keys.append(launch_of(available, batch, dropout_p, of_keys, 128, shared, run, 64))
    return split_stages(batch, queries, keys)


def split_stages(batch: Batch, queries: list[Launch], keys: list[Launch]) -> list[Stage]:
    """Of a backward pass by two kernels, the first of which computes dQ and delta. Each reads q, k,
    v and dout, the first one also out and lse, the second one lse and delta."""
    size = batch.tokens * batch.heads * (6 * 2 * batch.head_dim + 8)
    return [Stage("backward, dQ", queries, size), Stage("backward, dK and dV", keys, size)]


def bias_kernel_names(head_dim: int) -> list[str]:
    """Those of a backward pass with a position bias."""
    d, tile = head_dim, backward_tile(head_dim)
    return [
        kernel_name("attention_backward_dq_kernel", d, True, True, bias=True),
        kernel_name("attention_backward_kernel", d, 4, True, False, True, tile, bias=True),
    ]


def kernel_names(head_dim: int) -> list[str]:
    """The mangled names of all kernels that these launches may need."""
    names = []
    for dropout in (False, True):
        for tiles in (1, 2):
            names.append(kernel_name("attention_forward_kernel", head_dim, tiles, dropout, False))
        shapes = ((4, False, backward_tile(head_dim)), (4, True, 64), (4, True, 32), (8, True, 64))
        for warps, fused, tile in shapes:
            arguments = (head_dim, warps, dropout, fused, False, tile)
            names.append(kernel_name("attention_backward_kernel", *arguments))
        names.append(kernel_name("attention_backward_dq_kernel", head_dim, dropout, False))
    return names
