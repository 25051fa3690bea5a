"""Plain-PyTorch references of the operators, readable line by line and as exact as their input.

Given float64 tensors they are the truth that the operators are measured against; given bf16 they
show what plain PyTorch makes of the same formula in that precision. `philox` draws the dropout
masks of csrc/common/philox.h again, in numpy.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

MASK32 = np.uint64(0xFFFFFFFF)


def philox(
    counter: Sequence[np.ndarray | int], key: tuple[int, int], rounds: int = 7
) -> list[np.ndarray]:
    """Philox4x32 (Salmon et al., SC 2011) of arrays of 4 x 32-bit counters."""
    c = [np.asarray(x, dtype=np.uint64) for x in np.broadcast_arrays(*counter)]
    k0, k1 = key
    for _ in range(rounds):
        p0, p1 = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [
            (p1 >> np.uint64(32)) ^ c[1] ^ np.uint64(k0),
            p1 & MASK32,
            (p0 >> np.uint64(32)) ^ c[3] ^ np.uint64(k1),
            p0 & MASK32,
        ]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c


def _key(rng: Tensor) -> tuple[tuple[int, int], int]:
    seed, offset = (int(x) % 2**64 for x in rng)
    return (seed % 2**32, (seed >> 32) ^ (offset >> 32)), offset % 2**32


def keep_threshold(p: float) -> int:
    """Of 65,536 values, how many keep an element."""
    return int((1.0 - p) * 65536.0 + 0.5)


# All half-precision numbers that are not NaN, in order.
_HALVES = np.arange(2**16, dtype=np.uint16).view(np.float16)
_HALVES = np.sort(_HALVES[~np.isnan(_HALVES)])


def _number_above(count: int) -> np.float16 | None:
    """The half-precision number with so many below it, if there is one: -0 and 0 are equal."""
    if count < len(_HALVES) and (count == 0 or _HALVES[count - 1] < _HALVES[count]):
        return _HALVES[count]
    return None


def keeps(bits: np.ndarray, threshold: int) -> np.ndarray:
    """Which 16-bit numbers keep an element, `threshold` of all there are.

    Read as half-precision numbers those that are not below a limit or, where the others cannot be
    told apart by one, those that are.
    """
    numbers = bits.astype(np.uint16).view(np.float16)
    limit = _number_above(65536 - threshold)
    return numbers < _number_above(threshold) if limit is None else ~(numbers < limit)


def decision_bits(words: Sequence[np.ndarray], decision: np.ndarray) -> np.ndarray:
    """The 16 bits of each of a call's 16 decisions: 8 half-words, then those a byte further on."""
    word = np.broadcast_to(decision >> 1 & 3, np.broadcast_shapes(decision.shape, words[0].shape))
    pair = np.choose(word, words) | np.choose((word + 1) & 3, words) << np.uint64(32)
    shift = 16 * (decision & 1) + (decision & 8)
    return pair >> shift.astype(np.uint64) & np.uint64(0xFFFF)


def _kept(words: list[np.ndarray], decision: np.ndarray, p: float) -> Tensor:
    return torch.from_numpy(keeps(decision_bits(words, decision), keep_threshold(p)))


def row_mask(rng: Tensor, p: float, rows: int, columns: int) -> Tensor:
    """Which elements of [rows, columns] row dropout keeps."""
    key, offset = _key(rng)
    row, column = np.arange(rows)[:, None], np.arange(columns)[None]
    words = philox((column >> 4, row, 0, offset), key)
    return _kept(words, column & 15, p)


@lru_cache(maxsize=1024)
def _attention_mask(
    key: tuple[int, int], offset: int, p: float, stream: int, rows: int, columns: int
) -> Tensor:
    r, c = np.arange(rows)[:, None], np.arange(columns)[None]
    words = philox(((r >> 4) * 8 + (r & 7), (c >> 5) * 4 + (c >> 1 & 3), 1 + stream, offset), key)
    decision = (c >> 4 & 1) * 8 + (r >> 3 & 1) * 4 + (c >> 3 & 1) * 2 + (c & 1)
    return _kept(words, decision, p)


def attention_mask(rng: Tensor, p: float, stream: int, rows: int, columns: int) -> Tensor:
    """Which weights [rows, columns] of one sequence and head attention dropout keeps.

    `stream` is sequence * heads + head.
    """
    return _attention_mask(*_key(rng), p, stream, rows, columns)


def dropout_scale(p: float) -> float:
    """The reciprocal of the true keep rate."""
    return 65536.0 / keep_threshold(p)


def position_scores(
    positions: Tensor,
    keys: int,
    buckets: Tensor,
    table: Tensor | None = None,
    query: Tensor | None = None,
    key: Tensor | None = None,
) -> Tensor:
    """The position bias [heads, queries, keys] of one sequence, from its rows of query and key."""
    reach = len(buckets) // 2
    distance = torch.arange(keys, device=positions.device) - positions[:, None]
    bucket = buckets.long()[distance.clamp(-reach, reach) + reach]  # [queries, keys]
    total = 0.0
    if table is not None:
        total = total + table[bucket].permute(2, 0, 1)
    if query is not None:
        index = bucket.expand(query.shape[1], *bucket.shape)
        total = total + query.transpose(0, 1).gather(2, index)
    if key is not None:
        index = bucket.t().expand(key.shape[1], *bucket.t().shape)
        total = total + key.transpose(0, 1).gather(2, index).transpose(1, 2)
    return total


def varlen_cross_attention(
    q: Tensor,
    kv: Tensor,
    q_lengths: Sequence[int],
    k_lengths: Sequence[int],
    p: float = 0.0,
    rng: Tensor | None = None,
    scale: float | None = None,
    *,
    window: tuple[int, int] = (-1, -1),
    positions: Tensor | None = None,
    bias: tuple[Tensor | None, ...] | None = None,
) -> Tensor:
    """q [Tq, H, D], kv [Tk, 2, KH, D] -> [Tq, H, D], a sequence at a time.

    bias: buckets, table, query, key.
    """
    heads, head_dim = q.shape[1:]
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    outs = []
    pairs = zip(q.split(list(q_lengths)), kv.split(list(k_lengths)), strict=True)
    q_first = k_first = 0
    for sequence, (qs, kvs) in enumerate(pairs):
        k, v = kvs.repeat_interleave(heads // max(kv.shape[2], 1), dim=2).unbind(1)
        q_rows, k_rows = (
            slice(first, first + len(x)) for first, x in ((q_first, qs), (k_first, k))
        )
        q_first, k_first = q_rows.stop, k_rows.stop
        at = torch.arange(len(k) - len(qs), len(k), device=q.device)
        if positions is not None:
            at = positions[q_rows].long()
        scores = torch.einsum("ihd,jhd->hij", qs, k) * scale
        if bias is not None:
            buckets, table, query, key = bias
            rows = (None if x is None else x[r] for x, r in ((query, q_rows), (key, k_rows)))
            scores = scores + position_scores(at, len(k), buckets, table, *rows)
        distance = torch.arange(len(k), device=q.device) - at[:, None]
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if window[0] >= 0:
            hidden |= distance < -window[0]
        if window[1] >= 0:
            hidden |= distance > window[1]
        scores = scores.masked_fill(hidden, -math.inf)
        weights = torch.softmax(scores, dim=-1).masked_fill(hidden, 0.0)  # NaN if all are hidden
        if p > 0.0 and rng is not None:
            masks = [
                attention_mask(rng, p, sequence * heads + h, len(qs), len(k)) for h in range(heads)
            ]
            weights = weights * torch.stack(masks).to(q.device) * dropout_scale(p)
        outs.append(torch.einsum("hij,jhd->ihd", weights, v))
    return torch.cat(outs)


def varlen_attention(
    qkv: Tensor,
    lengths: Sequence[int],
    p: float = 0.0,
    rng: Tensor | None = None,
    scale: float | None = None,
    *,
    num_heads: int | None = None,
    **options: Any,
) -> Tensor:
    """qkv [T, 3, H, D], or with num_heads [T, H + 2 * KH, D], -> [T, H, D]."""
    if num_heads is None:
        q, kv = qkv[:, 0], qkv[:, 1:]
    else:
        q, kv = qkv[:, :num_heads], qkv[:, num_heads:].unflatten(1, (2, -1))
    return varlen_cross_attention(q, kv, lengths, lengths, p, rng, scale, **options)


def dropout_add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    eps: float = 1e-5,
    x_bias: Tensor | None = None,
    rng: Tensor | None = None,
    return_sum: bool = False,
    rms: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """LN(residual + dropout(x + x_bias)) over the last dimension."""
    y = x if x_bias is None else x + x_bias.to(x.dtype)
    if dropout_p > 0.0 and rng is not None:
        flat = y.reshape(-1, y.shape[-1])
        mask = row_mask(rng, dropout_p, *flat.shape).to(y.device)
        y = (flat * mask).view_as(y) * dropout_scale(dropout_p)
    if residual is not None:
        y = residual + y
    weight, bias = weight.to(y.dtype), None if bias is None else bias.to(y.dtype)
    if rms:
        norm = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight
    else:
        norm = functional.layer_norm(y, y.shape[-1:], weight, bias, eps)
    return (y, norm) if return_sum else norm


def bias_gelu(x: Tensor, bias: Tensor | None, approximate: str = "none") -> Tensor:
    """gelu(x + bias)."""
    return functional.gelu(x if bias is None else x + bias.to(x.dtype), approximate=approximate)


GATES = {
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
    "relu": functional.relu,
}


def glu(x: Tensor, kind: str, bias: Tensor | None = None) -> Tensor:
    """act(first half) * second half of x + bias."""
    a, gate = (x if bias is None else x + bias.to(x.dtype)).chunk(2, -1)
    return GATES[kind](a) * gate


def rotary(
    x: Tensor,
    positions: Tensor,
    *,
    heads: int,
    theta: float = 10000.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    position_scale: float = 1.0,
) -> Tensor:
    """x [tokens, N, head_dim], rotated; angles are computed in float64."""
    rotary_dim = x.shape[-1] if rotary_dim is None else rotary_dim
    powers = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=x.device) / rotary_dim
    angles = positions.double()[:, None, None] * position_scale * theta**-powers
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    turned, rest = x[:, :heads, :rotary_dim], x[:, :heads, rotary_dim:]
    pairs = turned.unflatten(-1, (-1, 2) if interleaved else (2, -1))
    a, b = pairs.unbind(-1 if interleaved else -2)
    pairs = torch.stack([a * cosine - b * sine, b * cosine + a * sine], -1 if interleaved else -2)
    return torch.cat([torch.cat([pairs.flatten(-2), rest], -1), x[:, heads:]], 1)


def embedding_layer_norm(
    input_ids: Tensor,
    position_ids: Tensor,
    token_type_ids: Tensor,
    word: Tensor,
    position: Tensor,
    token_type: Tensor,
    ln_weight: Tensor,
    ln_bias: Tensor,
    *,
    dropout_p: float = 0.0,
    eps: float = 1e-5,
    rng: Tensor | None = None,
) -> Tensor:
    """dropout(LN(word + position + token type))."""
    x = word[input_ids] + position[position_ids] + token_type[token_type_ids]
    y = functional.layer_norm(x, x.shape[-1:], ln_weight, ln_bias, eps)
    if dropout_p > 0.0 and rng is not None:
        y = y * row_mask(rng, dropout_p, *y.shape).to(y.device) * dropout_scale(dropout_p)
    return y


def masked_cross_entropy(
    logits: Tensor, labels: Tensor, vocab_size: int | None = None, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """Sum of the losses and number of correct predictions."""
    logits = logits[:, :vocab_size]
    loss = functional.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum")
    return loss, (logits.argmax(-1) == labels).sum()


def assert_as_good_as_pytorch(
    ours: Callable[[], Sequence[Tensor]],
    plain: Callable[[torch.dtype], Sequence[Tensor]],
    dtype: torch.dtype,
    names: Sequence[str],
    roundings: int = 1,
    terms: Callable[[str], Tensor | None] = lambda _name: None,
    sums: Mapping[str, str] | None = None,
) -> None:
    """The error rule of every operator test.

    `plain(dtype)` computes the reference in that dtype. In bf16 and fp16 our largest error against
    fp64 may be twice that of plain PyTorch; in fp32 it may be 1e-5 of the largest value.

    Among few values plain PyTorch's roundings can all be lucky. So in bf16 and fp16 an error may be
    as large as `roundings` of the largest value too: as many as follow one another on the way to a
    result, of which each adds up to one unit. By default that is the result's own. Where there are
    more, they rarely meet in one value, so the norm of all errors is held as well: that of so many
    independent roundings is sqrt(roundings / 3) units of the result's, and may be sqrt(3) of it.

    What is summed over rows, and may cancel, has the errors of its terms: then `terms(name)`, asked
    after `plain`, is these in fp64, [rows, ...], and their norm over rows counts like the result.
    Terms share roundings, such as attention's of one output, so twice as many may add up; and the
    norm of few sums is no surer than each of them.
    """
    truth = plain(torch.float64)
    peer = plain(dtype) if dtype != torch.float32 else truth
    for name, a, b, t in zip(names, ours(), peer, truth, strict=True):
        if t.numel() == 0:
            assert a.shape == t.shape, name
            continue
        ours_off, peer_off = a.double() - t, b.double() - t
        error, largest = ours_off.abs().max().item(), t.abs().max().item()
        unit, size = torch.finfo(dtype).eps / 2, t.norm().item()
        together = 1.0
        rows = terms(name)
        if sums is not None and name in sums:
            rows = truth[names.index(sums[name])].reshape(-1, *t.shape)
        if rows is not None:
            together = 2.0
            largest = max(largest, rows.norm(dim=0).max().item())
            size = max(size, rows.norm().item())
        if dtype == torch.float32:
            limit = 1e-5 * max(largest, 1e-3)
        else:
            limit = max(2 * peer_off.abs().max().item(), together * roundings * unit * largest)
        assert error <= limit, f"{name}: error {error:.3g} > {limit:.3g} (largest {largest:.3g})"
        if dtype != torch.float32 and roundings > 1:
            error = ours_off.norm().item()
            limit = max(2 * peer_off.norm().item(), together * math.sqrt(roundings) * unit * size)
            assert error <= limit, f"{name}: norm {error:.3g} > {limit:.3g} (of {size:.3g})"
