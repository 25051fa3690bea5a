"""What attention adds to its scores by the distance of key and query."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PositionBias:
    """Added to the scaled scores of attention: of query i, key j and a head

    table[b, head] + query[i, head, b] + key[j, head, b], where b is the bucket of the distance
    (position of key j - position of query i). At least one of the three is needed.

    Attributes:
        buckets: int32 [2 * reach + 1], the bucket of each distance from -reach to reach; further
            ones count as these. A number that is no bucket is an error, on a GPU a device-side
            assertion.
        table: [buckets, heads], one number per bucket and head, as in T5 (Raffel et al., arXiv
            1910.10683) and MPNet. It is used in float32.
        query: [query tokens, heads, buckets], the data's dtype: content-to-position scores.
        key: [key tokens, heads, buckets], the data's dtype: position-to-content scores. These two
            are DeBERTa's disentangled attention (He et al., arXiv 2006.03654).

    Minus infinity hides a key. A query that all keys are hidden from gets zeros, but its gradients,
    and the table's, are NaN.

    On a GPU the backward pass holds sums in float32, [query tokens, heads, buckets] for `query` or
    the gradient of `table`, and [key tokens, heads, buckets] for `key`: 0.8 GB for 16,384 tokens,
    12 heads and 1,023 buckets, 25 MB for 32 buckets.
    """

    buckets: Tensor
    table: Tensor | None = None
    query: Tensor | None = None
    key: Tensor | None = None


def t5_buckets(
    num_buckets: int = 32, max_distance: int = 128, device: torch.device | str | None = None
) -> Tensor:
    """Buckets of T5's encoder and of MPNet, for `PositionBias.buckets`.

    Half of the buckets are for keys that come after the query. Of each half, the first half has a
    distance each; the others get wider with the logarithm, up to max_distance (Raffel et al., arXiv
    1910.10683).

    Args:
        num_buckets: number of buckets, a multiple of 4.
        max_distance: distance, in tokens, from which on all are in the last bucket; more than
            num_buckets / 4.
        device: where the result is made.

    Returns:
        int32 [2 * max_distance + 1].

    Raises:
        ValueError: an argument is out of range.
    """
    exact = num_buckets // 4
    if num_buckets < 4 or num_buckets % 4:
        raise ValueError(f"t5_buckets: num_buckets must be a multiple of 4, got {num_buckets}")
    if max_distance <= exact:
        raise ValueError(
            f"t5_buckets: max_distance must be more than num_buckets / 4 = {exact}, "
            f"got {max_distance}"
        )
    distance = torch.arange(-max_distance, max_distance + 1, device=device)
    length = distance.abs()
    growth = torch.log(length.float() / exact) / math.log(max_distance / exact)
    wide = exact + (growth.clamp(min=0) * exact).long()
    bucket = torch.where(length < exact, length, wide.clamp(max=2 * exact - 1))
    return (bucket + (distance > 0) * (2 * exact)).int()


def deberta_buckets(
    max_position: int, position_buckets: int = -1, device: torch.device | str | None = None
) -> Tensor:
    """Buckets of DeBERTa (He et al., arXiv 2006.03654), for `PositionBias.buckets`.

    They are rows of its table of relative positions: span + (query position - key position), cut
    off at 0 and 2 * span - 1. With `position_buckets`, as in DeBERTa-v2 and v3, distances from
    half of the span on get wider with the logarithm.

    Args:
        max_position: the largest distance told apart, in tokens (`max_relative_positions`).
        position_buckets: the span, an even number of at least 4 and at most max_position; -1
            (none): the span is max_position.
        device: where the result is made.

    Returns:
        int32 [2 * max_position + 1], of 2 * span buckets.

    Raises:
        ValueError: an argument is out of range.
    """
    if max_position < 1:
        raise ValueError(f"deberta_buckets: max_position must be at least 1, got {max_position}")
    distance = torch.arange(max_position, -max_position - 1, -1, device=device)
    if position_buckets == -1:
        return (distance + max_position).clamp(0, 2 * max_position - 1).int()
    span, middle = position_buckets, position_buckets // 2
    if span < 4 or span % 2 or span > max_position:
        raise ValueError(
            "deberta_buckets: position_buckets must be -1 or an even number from 4 to "
            f"max_position = {max_position}, got {span}"
        )
    length = distance.abs().clamp(min=middle)
    growth = torch.log(length / middle) / torch.log(torch.tensor((max_position - 1) / middle))
    wide = torch.ceil(growth * (middle - 1)).long() + middle
    bucket = torch.where(distance.abs() <= middle, distance, wide * distance.sign())
    return (bucket + span).clamp(0, 2 * span - 1).int()


def alibi_slopes(heads: int) -> Tensor:
    """Slopes of ALiBi (Press et al., arXiv 2108.12409), float32 [heads].

    For a power of 2 they are 2^(-8 / heads), 2^(-16 / heads), ...; other numbers of heads take
    those of the next lower power, then every second one of the next higher.

    Raises:
        ValueError: heads is below 1.
    """
    if heads < 1:
        raise ValueError(f"alibi_slopes: heads must be at least 1, got {heads}")
    power = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
    return torch.tensor(slopes)


def alibi_bias(
    heads: int, max_seqlen: int, device: torch.device | str | None = None
) -> PositionBias:
    """ALiBi (Press et al., arXiv 2108.12409): -slope * |distance|, for both directions.

    Args:
        heads: number of heads of the queries.
        max_seqlen: longest sequence, in tokens; longer distances count as this one.
        device: where the tensors are made.

    Raises:
        ValueError: heads or max_seqlen is below 1.
    """
    if max_seqlen < 1:
        raise ValueError(f"alibi_bias: max_seqlen must be at least 1, got {max_seqlen}")
    distance = torch.arange(-max_seqlen, max_seqlen + 1, device=device).abs()
    table = -torch.arange(max_seqlen + 1, device=device)[:, None] * alibi_slopes(heads).to(device)
    return PositionBias(distance.int(), table)
