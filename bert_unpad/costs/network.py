"""What communication costs: links, collectives on them, and a cluster of nodes.

Every message of n bytes takes alpha + n / beta seconds (latency and bandwidth; Hockney, "The
communication challenge for MPP", 1994). Collectives follow from that:

    ring reduce-scatter, all-gather     (n-1) * alpha  +  (n-1)/n * bytes / beta      each
    ring allreduce                      both: 2(n-1) * alpha + 2(n-1)/n * bytes / beta
    double binary tree allreduce        2*ceil(log2 n) * alpha + 2 * bytes / beta

(rings: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
2009; trees: Sanders, Speck, Traff, "Two-tree algorithms for full bandwidth broadcast, reduction and
scan", 2009.) Over several nodes the allreduce is hierarchical: reduce-scatter within each node,
allreduce of each rank's share with its counterparts in other nodes, all-gather within the node.
Contention, noise and the arithmetic of the reduction are left out.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class Link:
    """What a rank sends and receives through, within its node or to other nodes.

    Raises:
        ValueError: latency is negative or bandwidth not positive.
    """

    latency: float
    """alpha, in seconds."""
    bandwidth: float
    """beta, in bytes/s of one rank in each direction, both at the same time."""

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
        """Seconds until a rank has received `size` bytes in all (any shape) from `peers` others."""
        return peers * self.latency + np.asarray(size, np.float64) / self.bandwidth


@dataclass(frozen=True)
class Cluster:
    """Nodes with the same number of ranks each.

    The defaults are round figures of a node with 8 GPUs on NVLink and a 200 Gbit/s adapter for
    each; give those of your cluster.

    Raises:
        ValueError: `ranks_per_node` is not positive, or the algorithm is unknown.
    """

    ranks_per_node: int = 8
    node: Link = field(default_factory=lambda: Link(latency=5e-6, bandwidth=200e9))
    """The link between ranks of one node."""
    network: Link = field(default_factory=lambda: Link(latency=10e-6, bandwidth=25e9))
    """The link between nodes; its bandwidth is a rank's share of its node's."""
    algorithm: Literal["best", "ring", "tree"] = "best"
    """The allreduce between nodes; best: whichever is faster for the size, as NCCL chooses."""
    flat: bool = False
    """Whether an allreduce is one ring through all ranks instead, as gloo's on CPUs is."""
    hidden: float = 1.0
    """Share of the computing beside a collective that hides it: kernels and collectives of a GPU
    slow each other."""
    slowing: float = 0.0
    """What an allreduce between nodes takes longer for each doubling of the nodes, as a share."""

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1:
            raise ValueError(f"ranks_per_node: expected 1 or more, got {self.ranks_per_node}")
        if self.algorithm not in ("best", "ring", "tree"):
            raise ValueError(
                f"algorithm: expected 'best', 'ring' or 'tree', got {self.algorithm!r}"
            )

    def allreduce(self, size: float, ranks: int) -> float:
        """Seconds of an allreduce of `size` bytes over `ranks`; see the module and `flat`.

        Raises:
            ValueError: several nodes are needed and `ranks` does not fill them.
        """
        local = self._local_ranks(ranks)
        nodes = ranks // local
        if self.flat and nodes > 1:
            # The ring passes each node's link once, which so serves one rank.
            whole = Link(self.network.latency, self.network.bandwidth * local)
            return whole.ring_allreduce(size, ranks)
        share = size / local
        across = {
            "ring": self.network.ring_allreduce(share, nodes),
            "tree": self.network.tree_allreduce(share, nodes),
        }
        between = min(across.values()) if self.algorithm == "best" else across[self.algorithm]
        return self._within(size, local) + between * (1 + self.slowing * math.log2(nodes))

    def _within(self, size: float, local: int) -> float:
        """Seconds of the reduce-scatter and the all-gather within a node, as fast as NCCL's."""
        ways = {
            "ring": self.node.ring_allreduce(size, local),
            "tree": self.node.tree_allreduce(size, local),
        }
        return ways["ring"] if self.algorithm == "ring" else min(ways.values())

    def exchange(self, near: ArrayLike, far: ArrayLike, ranks: int) -> NDArray[np.float64]:
        """Seconds of an exchange of examples, an all-to-all within nodes and then one between them.

        Args:
            near: bytes that a rank receives from its own node, any shape; 0 costs nothing.
            far: bytes that it receives from other nodes, of the same shape.
            ranks: all that take part.
        """
        local = self._local_ranks(ranks)
        near, far = np.asarray(near, np.float64), np.asarray(far, np.float64)
        return np.where(near > 0, self.node.all_to_all(near, local - 1), 0.0) + np.where(
            far > 0, self.network.all_to_all(far, ranks - local), 0.0
        )

    def to_dict(self) -> dict[str, object]:
        """The fields as JSON keeps them."""
        return asdict(self)

    def _local_ranks(self, ranks: int) -> int:
        local = min(self.ranks_per_node, ranks)
        if ranks < 1 or ranks % local:
            raise ValueError(
                f"ranks: expected a multiple of ranks_per_node ({self.ranks_per_node}), or fewer, "
                f"got {ranks}"
            )
        return local
