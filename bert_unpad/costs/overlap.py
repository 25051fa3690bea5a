"""How much of the sync of gradients the backward pass does not hide, bucket by bucket as in DDP.

Buckets are allreduced one after another, each when it is full on the slowest rank. So bucket i and
all later ones still have to be allreduced when bucket i is full, and the sync outlasts the backward
pass by

    max over i of   seconds of buckets i, i + 1, ...  -  backward pass that is left at bucket i

`BucketOverlap` has the buckets of a model. `Overlap` knows only the size of the gradient and takes
equal buckets.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bert_unpad.costs.network import Cluster

BACKWARD_SHARE = 2 / 3
"""The backward pass's share of a pass: it has twice the forward pass's matrix products."""


class SyncBucket(NamedTuple):
    """What one bucket sends, and when."""

    sizes: tuple[float, ...]
    """Bytes of each of its allreduces."""
    left: float
    """Part of the backward pass that is left when the bucket is full."""


def exposed_seconds(
    buckets: Sequence[SyncBucket],
    backward: ArrayLike,
    cluster: Cluster,
    ranks: int,
    whole: float = 1.0,
    collective: float = 1.0,
) -> NDArray[np.float64]:
    """Seconds from the end of the backward pass to the end of the sync.

    Args:
        buckets: in the order in which they are allreduced; the last is full at the end.
        backward: seconds of the slowest rank's backward pass, any shape.
        cluster: what it runs on.
        ranks: that average their gradients.
        whole: a whole backward pass, in the unit of the buckets' `left`.
        collective: what a bucket's collective is of an allreduce; a reduce-scatter is half.
    """
    each = [
        collective * sum(cluster.allreduce(size, ranks) for size in bucket.sizes)
        for bucket in buckets
    ]
    # Rounded once, so that n equal buckets take exactly n times as long as one.
    rest = np.array([math.fsum(each[i:]) for i in range(len(each))])
    left = np.array([bucket.left for bucket in buckets])
    hiding = cluster.hidden * np.asarray(backward, np.float64)[..., None]
    return (rest - hiding * left / whole).max(axis=-1)


@dataclass(frozen=True)
class BucketOverlap:
    """The overlap of a model's own buckets, see `bert_unpad.costs.sync.sync_buckets`."""

    buckets: Sequence[SyncBucket]
    """Buckets in the order of their allreduces, `left` as a share of the backward pass."""
    backward_share: float = BACKWARD_SHARE
    """The backward pass's share of a pass's computing."""
    collective: float = 1.0
    """What a bucket's collective is of an allreduce; a reduce-scatter is half."""

    def exposed(self, compute: ArrayLike, cluster: Cluster, ranks: int) -> NDArray[np.float64]:
        """Seconds by which the sync outlasts a pass of the slowest rank, see `Overlap.exposed`."""
        backward = np.asarray(compute, np.float64) * self.backward_share
        return exposed_seconds(self.buckets, backward, cluster, ranks, collective=self.collective)


@dataclass(frozen=True)
class Overlap:
    """The overlap of N equal buckets; bucket i is full at (i + 1) / N of the backward pass.

    Raises:
        ValueError: a size is not positive, or a share lies outside 0 .. 1.
    """

    gradient_bytes: float
    """The whole gradient as it travels."""
    bucket_bytes: float = 25 * 2**20
    """Greatest size of a bucket; PyTorch's default."""
    backward_share: float = BACKWARD_SHARE
    """The backward pass's share of a step's computing."""
    overlapped: bool = True
    """False: the whole gradient is one bucket, which is allreduced after the backward pass."""

    def __post_init__(self) -> None:
        for name in ("gradient_bytes", "bucket_bytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: expected more than 0, got {getattr(self, name)}")
        if not 0 <= self.backward_share <= 1:
            raise ValueError(f"backward_share: expected 0 to 1, got {self.backward_share}")

    def exposed(self, compute: ArrayLike, cluster: Cluster, ranks: int) -> NDArray[np.float64]:
        """Seconds by which the sync outlasts the computing of the slowest rank.

        Args:
            compute: seconds of the slowest rank in each step, any shape.
            cluster: what it runs on.
            ranks: that average their gradients.
        """
        count = math.ceil(self.gradient_bytes / self.bucket_bytes) if self.overlapped else 1
        size = self.gradient_bytes / count
        buckets = [SyncBucket((size,), left) for left in reversed(range(count))]
        backward = np.asarray(compute, np.float64) * self.backward_share
        return exposed_seconds(buckets, backward, cluster, ranks, whole=count)
