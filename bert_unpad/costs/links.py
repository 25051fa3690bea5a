"""Links by the names that networks are sold under: Ethernet rates, InfiniBand, NVLink, PCIe."""

import re

from bert_unpad.costs.cards import Card
from bert_unpad.costs.network import Cluster, Link

PAYLOAD = 0.94
"""Share of a link's rate that is data: 1,448 bytes of each 1,538 of an Ethernet frame with TCP/IP
headers and timestamps, preamble and gap."""

# Latency of a message as a collective sees it. TCP passes through the kernel of both hosts (30 us
# are usual between hosts of one rack), InfiniBand does not (about 1 us on the wire; 10 with a
# collective's own work, as in `Cluster`).
_TCP_LATENCY, _INFINIBAND_LATENCY = 30e-6, 10e-6

# Rates of four lanes, in Gbit/s of data (InfiniBand Trade Association's roadmap).
_INFINIBAND = {"ib": 200, "ib-edr": 100, "ib-hdr": 200, "ib-ndr": 400}

NVLINK_SHARE = 0.75
"""Share of NVLink's bandwidth in each direction that an allreduce sees."""

HIDDEN, SLOWING = 0.39, 0.018
"""`hidden` and `slowing` of a `Cluster` of GPUs, fitted by benchmarks/check_published.py."""

INTRA_NODE = {
    # What an allreduce sees of NVLink 3, and of PCI Express 4.0 x16, below its 32 GB/s.
    "nvlink": Link(latency=2e-6, bandwidth=NVLINK_SHARE * 300e9),
    "pcie": Link(latency=10e-6, bandwidth=12e9),
}
"""Links between the ranks of a node."""


def network_link(
    name: str, ranks_per_node: int, *, adapters: int = 1, latency: float | None = None
) -> Link:
    """A rank's share of what joins its node to others.

    Args:
        name: bits per second of one adapter as a number with M or G (`100M`, `10G`), or `IB` (that
            is `IB-HDR`, 200 Gbit/s), `IB-EDR`, `IB-NDR`.
        ranks_per_node: that share a node's adapters.
        adapters: of a node.
        latency: seconds of a message; by default 30 us (TCP), 10 us (InfiniBand).

    Raises:
        ValueError: the name is none of these.
    """
    rate: float | None = _INFINIBAND.get(name.lower())
    usual = _INFINIBAND_LATENCY
    if rate is None:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([MG])(?:bit)?", name, re.IGNORECASE)
        if match is None or float(match[1]) == 0:
            raise ValueError(
                "argument --network: expected a rate such as 100M, 10G or 100G, or IB, IB-EDR, "
                f"IB-HDR, IB-NDR, got {name!r}"
            )
        rate = float(match[1]) * (1 if match[2].upper() == "G" else 1e-3)
        usual = _TCP_LATENCY
    share = adapters / ranks_per_node
    return Link(usual if latency is None else latency, rate * 1e9 / 8 * PAYLOAD * share)


def card_link(card: Card) -> Link:
    """The link between cards of a node: NVLink where they have it, or PCIe."""
    if not card.nvlink_gbs:
        return INTRA_NODE["pcie"]
    return Link(INTRA_NODE["nvlink"].latency, NVLINK_SHARE * card.nvlink_gbs * 1e9)


def gpu_cluster(ranks_per_node: int, node: Link, network: Link) -> Cluster:
    """Nodes of GPUs, whose collectives and kernels slow each other."""
    return Cluster(ranks_per_node, node, network, hidden=HIDDEN, slowing=SLOWING)


def intra_node_link(name: str) -> Link:
    """The link between the ranks of a node: `nvlink`, `pcie`, or GB/s of a rank in each direction.

    Raises:
        ValueError: it is none of these.
    """
    if name in INTRA_NODE:
        return INTRA_NODE[name]
    try:
        return Link(INTRA_NODE["pcie"].latency, float(name) * 1e9)
    except ValueError:
        raise ValueError(
            f"argument --intra-node: expected nvlink, pcie or GB/s above 0, got {name!r}"
        ) from None
