"""What a pass costs on a card: each term by hand, and how they grow."""

from dataclasses import replace

import pytest

from bert_unpad.costs import kernels
from bert_unpad.costs.cards import CARDS, PRODUCTS_SHARE
from bert_unpad.costs.device import card_device
from bert_unpad.costs.gradient_buckets import num_parameters
from bert_unpad.costs.kernels import RATES, KernelRates, layer_numbers, pass_cost, rounded_numbers
from bert_unpad.costs.links import NVLINK_SHARE, card_link, gpu_cluster, intra_node_link
from bert_unpad.costs.network import Link
from bert_unpad.costs.optimizers import OPTIMIZER_COSTS, muon_flops
from bert_unpad.costs.workload import OPTIMIZERS, Workload
from bert_unpad.nn import BertConfig
from bert_unpad.nn.config import PRESETS, EncoderConfig
from bert_unpad.nn.flops import attention_flops, training_flops
from tests.support.cost_models import TINY, all_of

H100 = CARDS["h100"]
LARGE = BertConfig(**PRESETS["bert-large"])


def test_the_terms_by_hand():
    config = replace(TINY, attention_probs_dropout_prob=0.0)
    cost = pass_cost(config, H100, "bf16", 64)
    # Post-norm, 16 wide, 2 layers: norms 16 H, activation 5 I, attention 12 H, of 2 bytes.
    moved = 2 * 2 * (16 * 16 + 5 * 32 + 12 * 16)
    bandwidth = RATES.streamed * 3350e9
    lengths = [40] * 20
    arithmetic = training_flops(config, lengths) - attention_flops(config, lengths)
    products = 0.68 * 989e12
    attention = attention_flops(config, lengths) / (RATES.attention * 989e12)
    tokens = 40 * 20
    expected = arithmetic / products + attention + tokens * moved / bandwidth
    # What a batch costs whatever its size, the next-sentence head, is a small part.
    assert cost.seconds(lengths) - cost.fixed == pytest.approx(expected, rel=0.05)
    fixed = (32 * 2 + 60) * RATES.kernel + 8 * num_parameters(config) / bandwidth
    assert cost.fixed == pytest.approx(fixed)


def test_attention_is_part_of_the_operations():
    lengths = [100, 300, 512]
    attention = attention_flops(LARGE, lengths)
    assert attention == 3 * 24 * 4 * 1024 * sum(n * n for n in lengths)
    assert 0 < attention < training_flops(LARGE, lengths)
    modern = EncoderConfig(**PRESETS["modernbert-base"])
    full = replace(modern, window_pattern=(-1,))
    assert attention_flops(modern, [4096]) < attention_flops(full, [4096]) / 2


def test_what_makes_a_pass_slower():
    plain = pass_cost(replace(LARGE, attention_probs_dropout_prob=0.0), H100, "bf16", 512)
    dropout = pass_cost(LARGE, H100, "bf16", 512)
    assert dropout.quadratic == pytest.approx(RATES.dropout * plain.quadratic, rel=1e-3)
    assert dropout.fixed == plain.fixed
    # 8 bits: products faster, more bytes; attention stays in 16 bits.
    fp8 = pass_cost(LARGE, H100, "fp8", 512)
    assert plain.linear > fp8.linear > plain.linear / 2
    assert fp8.quadratic == pytest.approx(dropout.quadratic, rel=1e-3)
    assert pass_cost(LARGE, H100, "fp32", 512).linear > 5 * plain.linear
    assert pass_cost(LARGE, CARDS["h200"], "bf16", 512).linear < dropout.linear
    assert pass_cost(LARGE, H100, "bf16", 512, masked=0.3).linear > dropout.linear
    half = pass_cost(LARGE, H100, "bf16", 512, products_share=0.34)
    assert half.linear > 1.4 * dropout.linear


def test_numbers_of_a_layer():
    assert layer_numbers(TINY) == 16 * 16 + 5 * 32 + 12 * 16
    modern = EncoderConfig(**PRESETS["modernbert-base"])
    assert layer_numbers(modern) == 16 * 768 + 8 * 1152 + 20 * 768  # a gate, and rotations
    assert rounded_numbers(TINY) == (3 * 16 + 32) + (5 * 16 + 32)
    assert rounded_numbers(modern) == (3 * 768 + 1152) + (5 * 768 + 2 * 1152)


def test_rates_can_be_replaced(monkeypatch):
    before = pass_cost(LARGE, H100, "bf16", 512)
    monkeypatch.setattr(kernels, "RATES", KernelRates(kernel=2 * RATES.kernel))
    assert pass_cost(LARGE, H100, "bf16", 512).fixed > before.fixed


def test_shares_of_a_card():
    assert CARDS["a100-80"].products_share("bf16") == PRODUCTS_SHARE[7, 0]["16bit"]
    assert CARDS["l4"].products_share("fp8") == PRODUCTS_SHARE[8, 9]["8bit"]
    assert H100.products_share("fp32") == PRODUCTS_SHARE[9, 0]["16bit"]
    assert CARDS["rtx5090"].products_share("fp8") == PRODUCTS_SHARE[10, 0]["8bit"]
    assert all((card.tflops_8bit > 0) == (card.capability >= (8, 9)) for card in CARDS.values())


def test_devices_in_8_bits():
    work = Workload(LARGE, all_of(128), 8, 1, precision="fp8")
    plain = card_device(H100, replace(work, precision="bf16"))
    fp8 = card_device(H100, work)
    assert fp8.update > plain.update  # weights are rounded once an update
    assert fp8.band == plain.band > 0
    with pytest.raises(ValueError, match="precision: expected bf16, fp16 or fp32 on a100-80"):
        card_device(CARDS["a100-80"], work)


def test_every_optimizer_has_a_cost():
    work = Workload(TINY, all_of(16), 8, 1)
    for name in OPTIMIZERS:
        assert OPTIMIZER_COSTS[name].traffic >= 28
        assert card_device(H100, replace(work, optimizer=name)).update > 0
    # Of each layer 16 x 16 three times and more; queries, keys and values are one matrix or three.
    assert muon_flops(TINY) > 2 * 5 * 2 * 16 * 16 * (2 * 16 + 16)


def test_links_between_cards():
    assert card_link(H100).bandwidth == pytest.approx(NVLINK_SHARE * 450e9)
    assert card_link(CARDS["l4"]) == intra_node_link("pcie")
    assert card_link(CARDS["a100-80"]) == intra_node_link("nvlink")
    cluster = gpu_cluster(8, card_link(H100), Link(1e-5, 5e10))
    assert 0 < cluster.hidden < 1
    plain = replace(cluster, slowing=0.0)
    assert cluster.allreduce(1e9, 8) == plain.allreduce(1e9, 8)
    assert cluster.allreduce(1e9, 64) > plain.allreduce(1e9, 64)
