"""Every family under `torch.compile` and under bf16 autocast."""

import random

import pytest
import torch
import torch.nn.functional as F

from bert_unpad.nn import EncoderConfig, EncoderForPreTraining
from tests.support.tolerances import assert_same_gradients

transformers = pytest.importorskip("transformers")

from tests.support.encoder_families import (
    CASES,
    Case,
    own_loss,
    padded_and_packed,
)
from tests.support.seeds import derived

# Of those whose parts differ most; BERT's are in test_bert.py.
_TYPES = ("albert", "modernbert", "eurobert", "esm", "deberta-v2")
_MLM = {str(case): case for case in reversed(CASES) if "mlm" in case.heads}
ONE_EACH = [case for case in _MLM.values() if case.model_type in _TYPES]


def make_model(case: Case, seed: int):
    values = case.values(random.Random(derived(seed))) | dict.fromkeys(case.dropout, 0.0)
    config = EncoderConfig.from_dict(
        {"model_type": case.model_type, "architectures": [case.architecture]} | values
    )
    torch.manual_seed(derived(seed))
    model = EncoderForPreTraining(config).train()
    return model, *padded_and_packed(case, config.vocab_size, config.type_vocab_size, seed)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


@pytest.mark.parametrize("case", ONE_EACH, ids=str)
def test_compiled_as_one_graph(case: Case) -> None:
    model, padded, packed = make_model(case, 1)
    want = own_loss(model, padded, packed)
    want.backward()
    want_grads = gradients(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    out = compiled(packed)
    (out.mlm_loss_sum / packed.num_masked + out.nsp_loss_sum / packed.batch.batch_size).backward()
    assert_same_gradients(gradients(model), want_grads)


@pytest.mark.parametrize("case", ONE_EACH, ids=str)
def test_autocast_computes_in_bf16_with_fp32_parameters(case: Case) -> None:
    model, padded, packed = make_model(case, 2)
    exact = own_loss(model, padded, packed)
    exact.backward()
    exact_grads = gradients(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.encode(packed).dtype == torch.bfloat16
        loss = own_loss(model, padded, packed)
        loss.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, exact, rtol=0.05, atol=0.0)
    largest = max(grad.norm() for grad in exact_grads.values())
    for name, grad in gradients(model).items():
        assert grad.dtype == torch.float32
        if exact_grads[name].norm() > 0.02 * largest:
            similarity = F.cosine_similarity(grad.flatten(), exact_grads[name].flatten(), dim=0)
            assert similarity > 0.97, name
