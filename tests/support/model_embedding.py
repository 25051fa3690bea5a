"""embedding_layer_norm, and the sort of its backward pass, on the model of a block."""

import ctypes
from collections.abc import Iterable, Sequence
from functools import cache

import torch
from torch import Tensor

from gpu_model.block_model import Model
from tests.support.backends import on_the_model
from tests.support.model_checks import DTYPES, Buffers, load_kernels
from tests.support.model_norm import RowNormParams, row_norm_params, set_backward, set_forward


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


def _params(
    buffers: Buffers, ids: Sequence[Tensor], tables: Sequence[Tensor], norm: RowNormParams
) -> EmbeddingCudaParams:
    """What forward and backward kernels get."""
    tokens = TokenIds(
        _pointers(map(buffers.read, ids)), (ctypes.c_int64 * 3)(*map(len, tables)), len(ids[0])
    )
    return EmbeddingCudaParams(
        norm=norm,
        table_dtype=DTYPES[tables[0].dtype],
        tokens=tokens,
        tables=_pointers(map(buffers.read, tables)),
    )


def _pointers(addresses: Iterable[int | None]) -> ctypes.Array:
    return (ctypes.c_void_p * 3)(*addresses)


@on_the_model(model)
def embedding_layer_norm(
    input_ids: Tensor, position_ids: Tensor, token_type_ids: Tensor, word: Tensor,
    position: Tensor, token_type: Tensor, weight: Tensor, bias: Tensor, dropout_p: float,
    eps: float, out_dtype: torch.dtype, rng: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    buffers, tokens = Buffers(model()), len(input_ids)
    y = word.new_empty(tokens, word.shape[1], dtype=out_dtype)
    norm = row_norm_params(buffers, out_dtype, tokens, weight, dropout_p, rng)
    mean, rstd = set_forward(buffers, norm, bias, eps)
    ids, tables = (input_ids, position_ids, token_type_ids), (word, position, token_type)
    params = _params(buffers, ids, tables, norm)
    params.y = buffers.write(y)
    model().call("embedding_forward", ctypes.byref(params))
    return y, mean, rstd


@on_the_model(model)
def embedding_layer_norm_backward(
    dy: Tensor, input_ids: Tensor, position_ids: Tensor, token_type_ids: Tensor, word: Tensor,
    position: Tensor, token_type: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor,
    dropout_p: float, rng: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    kernels = model()
    buffers, tokens = Buffers(kernels), len(input_ids)
    norm = row_norm_params(buffers, dy.dtype, tokens, weight, dropout_p, rng)
    dweight, dbias = set_backward(buffers, norm, dy, mean, rstd, weight)
    ids, tables = (input_ids, position_ids, token_type_ids), (word, position, token_type)
    params, gradients = _params(buffers, ids, tables, norm), [torch.empty_like(t) for t in tables]
    params.dtables = _pointers(map(buffers.write, gradients))
    sizes = (ctypes.c_int64 * 5)()
    kernels.call("embedding_scratch", ctypes.byref(params), sizes)
    partials, pieces, words, stride, tickets = sizes
    params.norm.partials = buffers.write(torch.empty(2, partials, len(weight)))
    params.pieces = buffers.write(torch.empty(pieces, stride))
    params.dz = buffers.write(torch.empty(tokens, stride))
    space = torch.full((words,), -(2**31), dtype=torch.int32)
    params.sort_space = kernels.register(space).data_ptr()
    with buffers.tickets(tickets) as params.norm.tickets:
        kernels.call("embedding_backward", ctypes.byref(params))
    return *gradients, dweight, dbias


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
