"""What attention adds to its scores by the distance of key and query."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class PositionBias:
    """Added to the scaled scores of attention: of query i, key j and a head

    table[b, head] + query[i, head, b] + key[j, head, b], where b is the bucket of the distance
    (position of key j - position of query i). At least one of the three is needed.

    Attributes:
        buckets: int32 [2 * reach + 1], the bucket of each distance from -reach to reach; further
            ones count as these.
        table: [buckets, heads], float32 or the data's dtype: one number a bucket and head, as in
            T5 (Raffel et al., arXiv 1910.10683) and MPNet.
        query: [query tokens, heads, buckets], the data's dtype: content-to-position scores.
        key: [key tokens, heads, buckets], the data's dtype: position-to-content scores. These two
            are DeBERTa's disentangled attention (He et al., arXiv 2006.03654).
    """

    buckets: Tensor
    table: Tensor | None = None
    query: Tensor | None = None
    key: Tensor | None = None
