"""How the benchmarks measure memory: against steps whose needs are known, and layers."""

import sys

import pytest
import torch

from benchmarks.lib import harness
from benchmarks.lib.saved_activations import saved_by
from bert_unpad.batch import VarlenBatch
from bert_unpad.nn import BertConfig, BertEncoder


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_a_known_step() -> None:
    weight = torch.zeros(1000, 1000, requires_grad=True)
    adam = torch.optim.Adam([weight])
    temporary = 80_000_000

    def step(size: int) -> None:
        adam.zero_grad(set_to_none=True)
        torch.ones(size, dtype=torch.uint8)
        weight.sum().backward()
        weight.grad = weight.grad.clone()
        adam.step()

    memory = harness.memory_of(adam, lambda: step(1), lambda: step(temporary))
    assert memory.state == pytest.approx(3 * weight.nbytes, abs=100)
    # The temporary is freed before the gradient is made; its memory may stay with the process.
    assert 0.95 * temporary <= memory.step <= temporary + 6 * weight.nbytes
    assert memory.peak == memory.state + memory.step


def test_what_a_linear_layer_keeps() -> None:
    # As many rows as the weight has, so that the shapes do not tell them apart.
    linear, x = torch.nn.Linear(24, 10), torch.randn(10, 24, requires_grad=True)
    saved = saved_by(lambda: linear(x), linear)
    assert (saved.activations, saved.weight_copies) == (10 * 24 * 4, 0)
    assert saved.tensors == (("float32", (10, 24), 10 * 24 * 4),)
    with torch.autocast("cpu", torch.bfloat16):
        cast = saved_by(lambda: linear(x), linear)
    assert (cast.activations, cast.weight_copies) == (10 * 24 * 2, 24 * 10 * 2)
    assert saved_by(lambda: linear(x), linear, [x]).activations == 0
    with pytest.raises(ValueError, match="with an autograd graph"):
        saved_by(lambda: linear(x).detach(), linear)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_keeps_what_the_documentation_says(dtype: torch.dtype) -> None:
    hidden, heads, batch = 64, 2, VarlenBatch.from_lengths([9, 0, 17])
    encoder = BertEncoder(
        BertConfig(
            hidden_size=hidden,
            num_hidden_layers=1,
            num_attention_heads=heads,
            intermediate_size=4 * hidden,
        )
    ).train()
    x = torch.randn(batch.total, hidden).to(dtype).requires_grad_()
    rng = torch.randint(1 << 60, (3, 2)).unbind()
    shared = [*rng, batch.cu_seqlens, batch.order_table]
    row = hidden * x.element_size()
    statistics = 4 * heads + 2 * 8  # log-sum-exp of each head; mean and 1/deviation of 2 LayerNorms
    for recompute, expected in {
        "none": 16 * row + statistics,
        "gelu": 12 * row + statistics,
        "layer": row,
    }.items():
        encoder.recompute = recompute
        saved = saved_by(lambda: encoder(x, batch, rng=rng), encoder, shared)
        assert saved.activations == batch.total * expected, recompute
