"""Cases of the self-test for attention."""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from bert_unpad import ops
from bert_unpad.batch import VarlenBatch
from bert_unpad.self_test.compare import (
    DROPOUT,
    Compared,
    Inputs,
    case,
    check_dropout_rate,
    compare,
    dropped,
)


def _attention(
    q: Tensor,
    kv: Tensor,
    q_lengths: Sequence[int],
    k_lengths: Sequence[int],
    masks: Sequence[Tensor] | None = None,
    biases: Sequence[Tensor] | None = None,
) -> Tensor:
    """Computes plain attention, one sequence at a time.

    A mask and a bias are [heads, queries, keys].
    """
    outs = []
    pairs = zip(q.split(list(q_lengths)), kv.split(list(k_lengths)), strict=True)
    for i, (queries, keys_values) in enumerate(pairs):
        keys, values = keys_values.unbind(1)
        scores = torch.einsum("ihd,jhd->hij", queries, keys) / math.sqrt(q.shape[-1])
        if biases is not None:
            scores = scores + biases[i]
        weights = dropped(scores.softmax(-1), None if masks is None else masks[i])
        outs.append(torch.einsum("hij,jhd->ihd", weights, values))
    return torch.cat(outs)


def _attention_masks(
    attend: Callable[[Tensor], Tensor], inputs: Inputs, lengths: Sequence[int], head_dim: int
) -> list[Tensor]:
    """Returns which weights of each sequence dropout keeps, for lengths up to head_dim.

    With equal scores and the identity as values, each weight appears in a column of the result.
    """
    qkv = torch.zeros(sum(lengths), 3, 2, head_dim, device=inputs.device, dtype=inputs.dtype)
    positions = torch.cat([torch.arange(n) for n in lengths]).to(inputs.device)
    qkv[torch.arange(len(qkv), device=inputs.device), 2, :, positions] = 1
    kept = attend(qkv) != 0
    parts = zip(kept.split(list(lengths)), lengths, strict=True)
    masks = [part[:, :, :n].permute(1, 0, 2) for part, n in parts]
    check_dropout_rate(torch.cat([mask.flatten() for mask in masks]))
    return masks


def _biases(
    buckets: Tensor,
    table: Tensor,
    queries: Tensor,
    keys: Tensor,
    q_lengths: Sequence[int],
    k_lengths: Sequence[int],
) -> list[Tensor]:
    """Returns what a position bias with all parts adds to the scores of each sequence."""
    biases, reach = [], len(buckets) // 2
    pairs = zip(queries.split(list(q_lengths)), keys.split(list(k_lengths)), strict=True)
    for query, key in pairs:
        columns = torch.arange(len(key), device=key.device)
        rows = torch.arange(len(query), device=key.device)[:, None]
        distance = columns - (rows + len(key) - len(query))
        bucket = buckets[distance.clamp(-reach, reach) + reach].long()
        total = table[bucket] + query[rows, :, bucket] + key[columns, :, bucket]
        biases.append(total.permute(2, 0, 1))
    return biases


@case
def varlen_attention(inputs: Inputs) -> Iterator[Compared]:
    for head_dim in (32, 64, 96, 128):
        lengths = [130, 1, 0, 33]
        batch = VarlenBatch.from_lengths(lengths, inputs.device)

        def plain(qkv, lengths=lengths, masks=None):
            return _attention(qkv[:, 0], qkv[:, 1:], lengths, lengths, masks)

        qkv = inputs.normal(sum(lengths), 3, 2, head_dim)
        yield from compare(
            inputs, lambda x, batch=batch: ops.varlen_attention(x, batch), plain, {"qkv": qkv}
        )
        lengths = [head_dim, 3, 29]
        batch, rng = VarlenBatch.from_lengths(lengths, inputs.device), inputs.rng()

        def attend(x, batch=batch, rng=rng):
            return ops.varlen_attention(x, batch, dropout_p=DROPOUT, rng=rng)

        masks = _attention_masks(attend, inputs, lengths, head_dim)
        qkv = inputs.normal(sum(lengths), 3, 2, head_dim)
        yield from compare(
            inputs,
            attend,
            lambda x, lengths=lengths, masks=masks: plain(x, lengths, masks),
            {"qkv": qkv},
        )


@case
def varlen_cross_attention(inputs: Inputs) -> Iterator[Compared]:
    q_lengths, k_lengths = [3, 1, 20], [70, 5, 41]
    cu_q = VarlenBatch.from_lengths(q_lengths, inputs.device).cu_seqlens
    cu_k = VarlenBatch.from_lengths(k_lengths, inputs.device).cu_seqlens
    longest = max(q_lengths), max(k_lengths)
    yield from compare(
        inputs,
        lambda q, kv: ops.varlen_cross_attention(q, kv, cu_q, cu_k, *longest),
        lambda q, kv: _attention(q, kv, q_lengths, k_lengths),
        {"q": inputs.normal(sum(q_lengths), 2, 64), "kv": inputs.normal(sum(k_lengths), 2, 2, 64)},
    )
    buckets = ops.t5_buckets(8, 20, inputs.device)

    def biased(q, kv, table, query, key):
        bias = ops.PositionBias(buckets, table, query, key)
        return ops.varlen_cross_attention(q, kv, cu_q, cu_k, *longest, position_bias=bias)

    def plain(q, kv, *parts):
        biases = _biases(buckets, *parts, q_lengths, k_lengths)
        return _attention(q, kv, q_lengths, k_lengths, biases=biases)

    yield from compare(
        inputs,
        biased,
        plain,
        {
            "q": inputs.normal(sum(q_lengths), 2, 64),
            "kv": inputs.normal(sum(k_lengths), 2, 2, 64),
            "table": inputs.parameter(8, 2),
            "query": inputs.normal(sum(q_lengths), 2, 8),
            "key": inputs.normal(sum(k_lengths), 2, 8),
        },
    )
