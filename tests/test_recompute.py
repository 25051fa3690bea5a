"""Recomputing in the backward pass changes no bit, and keeps what it says it keeps."""

from __future__ import annotations

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from test_nn import TINY, backward, make_inputs, make_model
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.autograd.graph import saved_tensors_hooks

from bert_unpad import ops
from bert_unpad.nn import BertForPreTraining
from bert_unpad.nn.gelu_linear import gelu_linear

DROPOUT = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3}


def results(model: BertForPreTraining, recompute: str, dtype: torch.dtype) -> list[Tensor]:
    """Losses and gradients of one step, as they are."""
    model.bert.encoder.recompute = recompute
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        out, grads = backward(model, make_inputs())
    return [*out, *grads.values()]


@pytest.mark.parametrize("hidden_act", ["gelu", "gelu_new"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recompute", ["gelu", "layer"])
def test_no_bit_changes(recompute: str, dtype: torch.dtype, hidden_act: str) -> None:
    model = make_model(hidden_act=hidden_act, **DROPOUT)
    plain = results(model, "none", dtype)
    for got, want in zip(results(model, recompute, dtype), plain, strict=True):
        assert torch.equal(got, want)


def test_compiled_it_is_not_kept_either() -> None:
    """A compiler would join the two equal calls; AOTAutograd's two graphs show whether it has."""
    graphs = []

    def keep(module: torch.fx.GraphModule, _inputs) -> torch.fx.GraphModule:
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    torch.manual_seed(6)
    tensors = [torch.randn(7, 24), torch.randn(24), torch.randn(10, 24)]
    dy = torch.randn(7, 10)
    expected, got = ([t.clone().requires_grad_() for t in tensors] for _ in range(2))
    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition
    )
    compiled = torch.compile(gelu_linear, fullgraph=True, backend=backend, dynamic=True)
    for inputs, function in ((expected, gelu_linear), (got, compiled)):
        function(*inputs, "none").backward(dy)
    for a, b in zip(expected, got, strict=True):
        assert torch.equal(a.grad, b.grad)
    operators = [[str(node.target) for node in graph.nodes] for graph in graphs]
    assert [names.count("bert_unpad.bias_gelu.default") for names in operators] == [1, 1]
    assert [names.count("aten.mm.default") for names in operators] == [1, 2]


def saved_bytes(model: BertForPreTraining, recompute: str, lengths: list[int]) -> int:
    """Bytes of the different storages that a forward pass keeps, without the parameters'."""
    model.bert.encoder.recompute = recompute
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(make_inputs(lengths))
    assert out.mlm_loss_sum.requires_grad
    return sum(t.untyped_storage().nbytes() for p, t in kept.items() if p not in parameters)


def test_the_gelu_output_is_not_kept() -> None:
    model, lengths = make_model(num_hidden_layers=3), [20, 11]
    inner = sum(lengths) * TINY.intermediate_size * 4
    none, gelu, layer = (saved_bytes(model, r, lengths) for r in ("none", "gelu", "layer"))
    # All layers but the last compute all tokens; the last one fewer.
    assert 2 * inner < none - gelu < 3 * inner
    assert layer < gelu - 2 * 8 * sum(lengths) * TINY.hidden_size * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("low_weights", [False, True])
def test_the_node_equals_the_two_operators(dtype: torch.dtype, low_weights: bool) -> None:
    torch.manual_seed(3)
    x, weight, bias = torch.randn(7, 24), torch.randn(10, 24), torch.randn(24)
    dy = torch.randn(7, 10).to(dtype)
    low = dtype if low_weights else torch.float32
    given = [x.to(dtype), bias.to(low), weight.to(low)]
    expected, got = ([t.clone().requires_grad_() for t in given] for _ in range(2))
    for form in ("none", "tanh"):
        y = ops.linear(ops.bias_gelu(*expected[:2], approximate=form), expected[2])
        z = gelu_linear(*got, form)
        assert torch.equal(y, z)
        y.backward(dy)
        with torch.autocast("cpu", torch.bfloat16):  # some run the backward pass within autocast
            z.backward(dy)
        for a, b in zip(expected, got, strict=True):
            assert a.grad.dtype == b.grad.dtype == a.dtype
            assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("frozen", [{0, 1}, {1}, {2}])
def test_the_node_leaves_out_what_nobody_asks_for(frozen: set[int]) -> None:
    torch.manual_seed(4)
    tensors = [torch.randn(5, 8), torch.randn(8), torch.randn(6, 8)]
    for i, tensor in enumerate(tensors):
        tensor.requires_grad_(i not in frozen)
    gelu_linear(*tensors, "none").sum().backward()
    assert [i for i, t in enumerate(tensors) if t.grad is None] == sorted(frozen)


def test_evaluation_recomputes_nothing() -> None:
    model = make_model().eval()
    plain = backward(model, make_inputs())
    for recompute in ("gelu", "layer"):
        model.bert.encoder.recompute = recompute
        got = backward(model, make_inputs())
        torch.testing.assert_close(got, plain, rtol=0, atol=0)


def test_other_values_are_refused() -> None:
    with pytest.raises(ValueError, match=r"recompute must be one of .*'gelu'.* got True"):
        make_model().bert.encoder.recompute = True
