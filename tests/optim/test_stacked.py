"""Parameters that hold several matrices: each is updated as a parameter of its own."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from bert_unpad.nn import EncoderConfig, EncoderForPreTraining
from bert_unpad.nn.stacked_linear import StackedLinear
from bert_unpad.optim import FusedAdam, FusedLAMB, FusedStableAdamW, Muon, decay_groups, muon_groups
from tests.support.seeds import derived

KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adam": (FusedAdam, {}),
    "lamb": (FusedLAMB, {}),
    "lamb, always": (FusedLAMB, {"always_adapt": True}),
    "lans": (FusedLAMB, {"nesterov": True}),
    "stable": (FusedStableAdamW, {"max_grad_norm": 0.5}),
}
ROWS = (6, 2, 3)


def pieces(layer: StackedLinear) -> list[nn.Linear]:
    """A layer for each of the stacked ones."""
    found = []
    for weight, bias in zip(layer.weight.split(ROWS), layer.bias.split(ROWS), strict=True):
        one = nn.Linear(layer.in_features, len(weight))
        one.weight.data.copy_(weight)
        one.bias.data.copy_(bias)
        found.append(one)
    return found


def gradients(layers: list[nn.Linear], step: int) -> None:
    draw = torch.Generator().manual_seed(derived(step))
    for name in ("weight", "bias"):
        for i, layer in enumerate(layers):
            p = getattr(layer, name)
            p.grad = (10.0**i * torch.randn(p.shape, generator=draw)).to(p.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KINDS)
def test_as_parameters_of_their_own(name: str, dtype: torch.dtype) -> None:
    kind, options = KINDS[name]
    options = options | {"lr": 0.05, "master_weights": dtype != torch.float32}
    stacked = StackedLinear(5, ROWS)
    parts = nn.ModuleList(pieces(stacked))
    stacked, parts = stacked.to(dtype), parts.to(dtype)
    ours = kind(decay_groups(stacked, 0.1), **options)
    theirs = kind(decay_groups(parts, 0.1), **options)
    for step in range(4):
        gradients(list(parts), step)
        for key in ("weight", "bias"):
            whole = torch.cat([getattr(part, key).grad for part in parts])
            getattr(stacked, key).grad = whole
        if step == 2:  # goes on from a saved state
            saved = copy.deepcopy(ours.state_dict())
            ours = kind(decay_groups(stacked, 0.1), **options)
            ours.load_state_dict(saved)
        ours.step()
        theirs.step()
    for key in ("weight", "bias"):
        want = torch.cat([getattr(part, key) for part in parts])
        torch.testing.assert_close(getattr(stacked, key), want, rtol=1e-6, atol=1e-7)
        state = ours.state[getattr(stacked, key)]
        assert state["step"] == 4
        assert state["exp_avg"].shape == getattr(stacked, key).shape


def test_rounded_copies_are_those_of_the_weight() -> None:
    layer = StackedLinear(5, ROWS)
    plain = copy.deepcopy(layer)
    options = {"lr": 0.05, "max_grad_norm": None}
    ours = FusedLAMB(decay_groups(layer, 0.1), **options)
    theirs = FusedLAMB(decay_groups(plain, 0.1), **options)
    ours.keep_rounded([layer.weight], torch.bfloat16)
    for step in range(3):
        gradients([layer], step)
        gradients([plain], step)
        ours.step()
        theirs.step()
    assert torch.equal(layer.weight, plain.weight)
    assert torch.equal(ours._rounded[layer.weight].tensor, plain.weight.bfloat16())


@pytest.mark.parametrize("optimizer", [FusedLAMB, Muon])
def test_grouped_queries_and_a_glu(optimizer: type[torch.optim.Optimizer]) -> None:
    """As a model whose queries, keys, values, gate and activation are parameters of their own."""
    config = EncoderConfig(
        model_type="bert_unpad", vocab_size=40, hidden_size=24, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, intermediate_size=20, feed_forward="glu",
        max_position_embeddings=8, hidden_act="silu", heads=("mlm",),
    )  # fmt: skip
    model = EncoderForPreTraining(config)
    groups = decay_groups if optimizer is FusedLAMB else muon_groups
    options = {"lr": 0.01, "weight_decay": 0.1}
    qkv, dense = (
        model.bert.encoder.layer[0].attention.self.qkv,
        model.bert.encoder.layer[0].intermediate.dense,
    )
    assert (qkv.stacked_rows, dense.stacked_rows) == ((24, 8, 8), (20, 20))
    parts = [
        nn.Parameter(part.clone())
        for layer in (qkv, dense)
        for part in layer.weight.detach().split(layer.stacked_rows)
    ]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for layer, own in ((qkv, parts[:3]), (dense, parts[3:])):
        layer.weight.grad = torch.randn_like(layer.weight)
        for part, grad in zip(own, layer.weight.grad.split(layer.stacked_rows), strict=True):
            part.grad = grad.clone()
    optimizer(groups(model, 0.1), **options).step()
    use = {"use_muon": True} if optimizer is Muon else {}
    optimizer([{"params": parts} | use], **options).step()
    got = [*qkv.weight.split(qkv.stacked_rows), *dense.weight.split(dense.stacked_rows)]
    for one, other in zip(got, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_rows_that_do_not_add_up() -> None:
    wrong = [((2, 2), (5, 3)), ((1,), ()), ((6, -1), (5, 3)), ((2.5, 2.5), (5, 3)), (-1, (5, 3))]
    for rows, shape in wrong:
        with pytest.raises(ValueError, match=r"stacked: expected numbers of rows that add up to"):
            FusedLAMB([{"params": [nn.Parameter(torch.ones(shape))], "stacked": rows}])
