"""Runs the CUDA kernels of embedding_layer_norm on the model of a block, on torch CPU tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from gpu_model.block_model import Model
from tests.support.model_checks import DTYPES, load_kernels
from tests.support.model_norm import Buffers, RowNormParams, row_norm_params


class TokenIds(ctypes.Structure):
    """Of csrc/embedding/token_sort.h."""

    _fields_ = (
        ("ids", ctypes.c_void_p * 3),
        ("entries", ctypes.c_int64 * 3),
        ("count", ctypes.c_int64),
    )


class EmbeddingCudaParams(ctypes.Structure):
    """Of csrc/embedding/embedding_cuda.h."""

    _fields_ = (
        ("norm", RowNormParams),
        ("table_dtype", ctypes.c_int),
        ("tokens", TokenIds),
        ("tables", ctypes.c_void_p * 3),
        ("y", ctypes.c_void_p),
        ("dtables", ctypes.c_void_p * 3),
        *((name, ctypes.c_void_p) for name in ("dz", "sort_space", "pieces")),
    )


@cache
def model() -> Model:
    """The kernels' library; compiled on first use."""
    return load_kernels("embedding", "embedding_params_size", EmbeddingCudaParams)


def embedding(
    ids: Sequence[Tensor],
    tables: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor,
    dy: Tensor | None,
    *,
    out_dtype: torch.dtype,
    p: float = 0.0,
    eps: float = 1e-5,
    rng: Tensor | None = None,
) -> dict[str, Tensor]:
    """y, mean, rstd; with dy also dword, dposition, dtoken_type, dweight and dbias."""
    kernels = model()
    buffers = Buffers(kernels)
    tokens, hidden = len(ids[0]), tables[0].shape[1]
    gradient = torch.zeros(tokens, hidden, dtype=out_dtype) if dy is None else dy
    norm, results = row_norm_params(
        buffers, out_dtype, tokens, weight, bias, p, eps, rng, gradient
    )  # fmt: skip
    results["y"] = torch.empty(tokens, hidden, dtype=out_dtype)
    names = ["dword", "dposition", "dtoken_type"]
    results |= {name: torch.empty_like(t) for name, t in zip(names, tables, strict=True)}

    def pointers(addresses):
        return (ctypes.c_void_p * 3)(*addresses)

    params = EmbeddingCudaParams(
        norm=norm,
        table_dtype=DTYPES[tables[0].dtype],
        tokens=TokenIds(
            pointers(map(buffers.read, ids)),
            (ctypes.c_int64 * 3)(*(len(t) for t in tables)),
            tokens,
        ),
        tables=pointers(map(buffers.read, tables)),
        y=buffers.write(results["y"]),
        dtables=pointers(buffers.write(results[name]) for name in names),
    )
    kernels.call("embedding_forward", ctypes.byref(params))
    if dy is not None:
        sizes = (ctypes.c_int64 * 5)()
        kernels.call("embedding_scratch", ctypes.byref(params), sizes)
        partials, pieces, words, stride, tickets = sizes
        params.norm.partials = buffers.write(torch.empty(2, partials, hidden))
        params.pieces = buffers.write(torch.empty(pieces, stride))
        params.dz = buffers.write(torch.empty(tokens, stride))
        space = torch.full((words,), -(2**31), dtype=torch.int32)
        params.sort_space = kernels.register(space).data_ptr()
        with buffers.tickets(tickets) as params.norm.tickets:
            kernels.call("embedding_backward", ctypes.byref(params))
    return results


def sort(ids: Tensor, entries: int) -> tuple[Tensor, Tensor, Tensor]:
    """ids, tokens and where each id begins, sorted beside two other tables."""
    kernels = model()
    kernels.clear()
    rest = torch.zeros_like(ids)
    for x in (ids, rest):
        kernels.register(x, writable=False)
    tokens = TokenIds(
        (ctypes.c_void_p * 3)(rest.data_ptr(), ids.data_ptr(), rest.data_ptr()),
        (ctypes.c_int64 * 3)(1, entries, 2),
        len(ids),
    )
    words = ctypes.c_int64()
    kernels.call("embedding_sort_words", ctypes.byref(tokens), ctypes.byref(words))
    space = kernels.register(torch.full((words.value,), -(2**31), dtype=torch.int32))
    out = [torch.empty(n, dtype=torch.int32) for n in (len(ids), len(ids), entries + 1)]
    kernels.call("embedding_sort", ctypes.byref(tokens), 1, space, *out)
    return out[0], out[1], out[2]
