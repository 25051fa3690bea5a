"""The benchmark of growth: where a curve passes the target, and layers that add nothing."""

import pytest
import torch

from benchmarks import growth
from bert_unpad.batch import PackedInputs, VarlenBatch
from bert_unpad.nn import EncoderConfig, EncoderForPreTraining
from bert_unpad.nn.config import PRESETS
from bert_unpad.pretrain import stages
from tests.support.seeds import derived


def test_compute_until_the_target_is_between_two_evaluations():
    curve = [
        {"flops": flops, "accuracy": accuracy}
        for flops, accuracy in ((1.0, 0.1), (2.0, 0.2), (4.0, 0.4), (5.0, 0.3))
    ]
    assert growth.flops_to(0.3, curve) == pytest.approx(3.0)
    assert growth.flops_to(0.4, curve) == pytest.approx(4.0)
    assert growth.flops_to(0.5, curve) is None


@pytest.mark.parametrize("really", [True, False])
def test_layers_that_are_added_change_nothing_at_first(really):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 48, "vocab_size": 100}
    torch.manual_seed(derived(0))
    model = EncoderForPreTraining(EncoderConfig(**(PRESETS["modernbert-base"] | sizes))).eval()
    inputs = PackedInputs.build(VarlenBatch.from_lengths([7, 5]), torch.randint(100, (12,)))
    before = model.bert(inputs)[0]
    with growth.preserving(really):
        copies = stages.add_layers(model, (0, 1))
    after = model.bert(inputs)[0]
    assert len(model.bert.encoder.layer) == 4
    added = model.bert.encoder.layer[2:].parameters()
    fresh = [p for p in added if p not in copies and not p.any()]
    assert len(fresh) == (4 if really else 0)
    assert ((after - before).abs().max() < 1e-5 * before.abs().max()) == really
