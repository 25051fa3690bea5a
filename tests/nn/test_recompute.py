"""Recomputing in the backward pass changes no bit of a model's step, and keeps what it says."""

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from bert_unpad.nn import BertForPreTraining
from bert_unpad.nn.rng import keyed_dropout
from tests.nn.test_bert import TINY, backward, make_inputs, make_model
from tests.support.seeds import derived

DROPOUT = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3}


def results(model: BertForPreTraining, recompute: str, dtype: torch.dtype) -> list[Tensor]:
    """Losses and gradients of one step, as they are."""
    model.bert.encoder.recompute = recompute
    torch.manual_seed(derived(5))
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


def test_dropout_follows_its_key() -> None:
    x, key = torch.randn(20, 16), derived(1)
    first, again, other = (keyed_dropout(x, 0.5, torch.tensor([k, 3])) for k in (key, key, key + 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    kept = first != 0
    assert 0.3 < kept.float().mean() < 0.7
    assert torch.equal(first[kept], 2 * x[kept])


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


def test_evaluation_recomputes_nothing() -> None:
    model = make_model().eval()
    plain = backward(model, make_inputs())
    for recompute in ("gelu", "layer"):
        model.bert.encoder.recompute = recompute
        got = backward(model, make_inputs())
        torch.testing.assert_close(got, plain, rtol=0, atol=0)


def test_other_values_are_refused() -> None:
    with pytest.raises(ValueError, match=r"recompute: expected one of .*gelu.* got True"):
        make_model().bert.encoder.recompute = True
