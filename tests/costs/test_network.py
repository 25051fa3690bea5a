"""Links, by formula and by name, collectives on them, and cards."""

import pytest

from bert_unpad.costs.cards import CARDS, find_card
from bert_unpad.costs.links import intra_node_link, network_link
from bert_unpad.costs.network import Cluster, Link


def test_link_formulas():
    link = Link(latency=1e-5, bandwidth=1e9)
    assert link.ring_allreduce(8e6, 4) == pytest.approx(2 * 3 * 1e-5 + 2 * 3 / 4 * 8e-3)
    assert link.tree_allreduce(8e6, 5) == pytest.approx(2 * 3 * 1e-5 + 2 * 8e-3)
    assert link.ring_allreduce(8e6, 1) == link.tree_allreduce(8e6, 1) == 0
    assert Link(0, 1e9).reduce_scatter(8e6, 4) == pytest.approx(3 / 4 * 8e-3)
    for arguments, name in (((-1, 1), "latency"), ((0, 0), "bandwidth")):
        with pytest.raises(ValueError, match=name):
            Link(*arguments)


def test_allreduce_is_hierarchical():
    node, network = Link(1e-6, 100e9), Link(1e-5, 10e9)
    ring = Cluster(4, node, network, "ring")
    size = 1e8
    inside = 2 * 3 * (1e-6 + size / 4 / 100e9)
    outside = 2 * 7 * (1e-5 + size / 4 / 8 / 10e9)
    assert ring.allreduce(size, 32) == pytest.approx(inside + outside)
    assert ring.allreduce(size, 4) == pytest.approx(inside)  # one node
    assert ring.allreduce(size, 1) == 0
    assert ring.allreduce(size, 2) == pytest.approx(2 * (1e-6 + size / 2 / 100e9))
    # Many ranks and few bytes: latency decides, and a tree has less of it.
    best, tree = Cluster(4, node, network), Cluster(4, node, network, "tree")
    assert best.allreduce(1e4, 4096) == tree.allreduce(1e4, 4096) < ring.allreduce(1e4, 4096)
    assert best.allreduce(1e9, 32) == ring.allreduce(1e9, 32) < tree.allreduce(1e9, 32)
    with pytest.raises(ValueError, match="ranks: expected a multiple of ranks_per_node"):
        ring.allreduce(size, 6)


def test_a_flat_allreduce_is_one_ring():
    node, network = Link(1e-6, 100e9), Link(1e-5, 10e9)
    flat, size = Cluster(4, node, network, flat=True), 1e8
    # The four ranks' shares of a node's link together serve the one rank that uses it.
    assert flat.allreduce(size, 32) == pytest.approx(2 * 31 * (1e-5 + size / 32 / 40e9))
    assert flat.allreduce(size, 4) == Cluster(4, node, network).allreduce(size, 4)


def test_links():
    link = network_link("10G", 8, adapters=2)
    assert link.bandwidth == pytest.approx(10e9 / 8 * 0.94 * 2 / 8)
    assert link.latency == 30e-6
    slow = network_link("100M", 1, latency=1e-6)
    assert (slow.latency, slow.bandwidth) == (1e-6, pytest.approx(0.94 * 12.5e6))
    assert network_link("IB", 1).bandwidth == pytest.approx(25e9 * 0.94)
    assert intra_node_link("25").bandwidth == 25e9
    for name in ("10", "0G", "fast", "-1G", "10Gb"):
        with pytest.raises(ValueError, match="argument --network: expected a rate"):
            network_link(name, 1)
    for name in ("sli", "0", "-3", "nan"):
        with pytest.raises(ValueError, match="argument --intra-node: expected nvlink"):
            intra_node_link(name)


def test_cards_without_kernels_are_refused():
    assert find_card("h100").peak("bf16") == pytest.approx(989e12)
    assert find_card("t4").peak("fp16") == pytest.approx(65e12)
    with pytest.raises(ValueError, match=r"argument --card: v100 .*CUDA operators need 7\.5"):
        find_card("v100")
    with pytest.raises(ValueError, match="argument --card: expected one of a100-40"):
        find_card("a100")
    without_bf16 = {card.name for card in CARDS.values() if card.is_supported and not card.has_bf16}
    assert without_bf16 == {"t4", "rtx2080ti"}
