"""What communication costs: links, collectives on them, and a cluster of nodes.

Every message of n bytes takes alpha + n / beta seconds (latency and bandwidth; Hockney, "The
communication challenge for MPP", 1994). Collectives follow from that:

    ring reduce-scatter, all-gather     (n-1) * alpha  +  (n-1)/n * bytes / beta      each
    ring allreduce                      both: 2(n-1) * alpha + 2(n-1)/n * bytes / beta
    double binary tree allreduce        2*ceil(log2 n) * alpha + 2 * bytes / beta

(rings: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
2009; trees: Sanders, Speck, Traff, "Two-tree algorithms for full bandwidth broadcast, reduction and
scan", 2009.) Over several nodes the allreduce is hierarchical: reduce-scatter within each node,
allreduce of every rank's share among its counterparts in other nodes, all-gather within the node.
Contention, noise and the arithmetic of the reduction are left out.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Cluster", "Link", "Overlap"]


@dataclass(frozen=True)
class Link:
    """What a rank sends and receives through.

    Raises:
        ValueError: latency is negative or bandwidth not positive.
    """

    latency: float
    """alpha, in seconds."""
    bandwidth: float
    """beta, in bytes/s of one rank in one direction, while it sends as much in the other."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency) and self.latency >= 0):
            raise ValueError(f"latency: expected seconds of 0 or more, got {self.latency}")
        if not self.bandwidth > 0:
            raise ValueError(f"bandwidth: expected bytes/s above 0, got {self.bandwidth}")

    def reduce_scatter(self, size: float, ranks: int) -> float:
        """Seconds of a ring reduce-scatter of `size` bytes; an all-gather to `size` is as long."""
        return (ranks - 1) * (self.latency + size / ranks / self.bandwidth)

    def ring_allreduce(self, size: float, ranks: int) -> float:
        """Seconds of a ring allreduce of `size` bytes."""
        return 2 * self.reduce_scatter(size, ranks)

    def tree_allreduce(self, size: float, ranks: int) -> float:
        """Seconds of an allreduce of `size` bytes over two binary trees, pipelined."""
        if ranks == 1:
            return 0.0
        return 2 * math.ceil(math.log2(ranks)) * self.latency + 2 * size / self.bandwidth

    def all_to_all(self, size: ArrayLike, peers: int) -> NDArray[np.float64]:
        """Seconds until a rank has received `size` bytes (any shape) from `peers` others."""
        return peers * self.latency + np.asarray(size, np.float64) / self.bandwidth


@dataclass(frozen=True)
class Cluster:
    """Nodes of equally many ranks.

    The defaults are round figures of a node with 8 GPUs on NVLink and a 200 Gbit/s adapter for
    each; give those of the cluster that is planned.

    Raises:
        ValueError: `ranks_per_node` is not positive, or the algorithm is unknown.
    """

    ranks_per_node: int = 8
    node: Link = field(default_factory=lambda: Link(latency=5e-6, bandwidth=200e9))
    """Between ranks of one node."""
    network: Link = field(default_factory=lambda: Link(latency=10e-6, bandwidth=25e9))
    """Between nodes; the bandwidth is a rank's share of its node's."""
    algorithm: Literal["best", "ring", "tree"] = "best"
    """Of the allreduce between nodes; best: whichever is faster for the size, as NCCL chooses."""

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1:
            raise ValueError(f"ranks_per_node: expected 1 or more, got {self.ranks_per_node}")
        if self.algorithm not in ("best", "ring", "tree"):
            raise ValueError(
                f"algorithm: expected 'best', 'ring' or 'tree', got {self.algorithm!r}"
            )

    def allreduce(self, size: float, ranks: int) -> float:
        """Seconds of an allreduce of `size` bytes over `ranks`, hierarchical; see the module.

        Raises:
            ValueError: several nodes are needed and `ranks` does not fill them.
        """
        local = self._local_ranks(ranks)
        nodes = ranks // local
        share = size / local
        across = {
            "ring": self.network.ring_allreduce(share, nodes),
            "tree": self.network.tree_allreduce(share, nodes),
        }
        between = min(across.values()) if self.algorithm == "best" else across[self.algorithm]
        return 2 * self.node.reduce_scatter(size, local) + between

    def exchange(self, near: ArrayLike, far: ArrayLike, ranks: int) -> NDArray[np.float64]:
        """Seconds of an all-to-all in which a rank receives `near` bytes within its node and `far`
        from other nodes (any shape), first one, then the other; 0 where nothing is received."""
        local = self._local_ranks(ranks)
        near, far = np.asarray(near, np.float64), np.asarray(far, np.float64)
        return np.where(near > 0, self.node.all_to_all(near, local - 1), 0.0) + np.where(
            far > 0, self.network.all_to_all(far, ranks - local), 0.0
        )

    def to_dict(self) -> dict[str, object]:
        """As JSON keeps it."""
        return asdict(self)

    def _local_ranks(self, ranks: int) -> int:
        local = min(self.ranks_per_node, ranks)
        if ranks < 1 or ranks % local:
            raise ValueError(
                f"ranks: expected a multiple of ranks_per_node ({self.ranks_per_node}), or fewer, "
                f"got {ranks}"
            )
        return local


@dataclass(frozen=True)
class Overlap:
    """How the allreduce of gradients hides behind the backward pass, bucket by bucket as in DDP.

    Bucket i of N is full when (i + 1) / N of the backward pass is done; buckets are reduced one
    after another, each when it is full on the slowest rank. What is left when the backward pass
    ends is exposed.

    Raises:
        ValueError: a size is not positive, or a share lies outside 0 .. 1.
    """

    gradient_bytes: float
    """Of the whole gradient as it travels."""
    bucket_bytes: float = 25 * 2**20
    """PyTorch's default."""
    backward_share: float = 2 / 3
    """Of a step's computing; the backward pass has twice the forward pass's matrix products."""
    overlapped: bool = True
    """False: the whole gradient is reduced as one bucket after the backward pass."""

    def __post_init__(self) -> None:
        for name in ("gradient_bytes", "bucket_bytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: expected more than 0, got {getattr(self, name)}")
        if not 0 <= self.backward_share <= 1:
            raise ValueError(f"backward_share: expected 0 to 1, got {self.backward_share}")

    def exposed(self, compute: ArrayLike, cluster: Cluster, ranks: int) -> NDArray[np.float64]:
        """Seconds by which the allreduce outlasts the computing of the slowest rank.

        Args:
            compute: seconds of the slowest rank in each step, any shape.
            cluster: what it runs on.
            ranks: that take part.
        """
        compute = np.asarray(compute, np.float64)
        if not self.overlapped:
            return np.full(compute.shape, cluster.allreduce(self.gradient_bytes, ranks))
        buckets = math.ceil(self.gradient_bytes / self.bucket_bytes)
        one = cluster.allreduce(self.gradient_bytes / buckets, ranks)
        # Bucket i is full when the backward pass has (N - 1 - i) / N to go, and N - i buckets are
        # then to be reduced. The end is set by the bucket for which that takes longest, which, as
        # it is linear in i, is the last or the first.
        from_first = buckets * one - compute * self.backward_share * (buckets - 1) / buckets
        return np.maximum(one, from_first)
