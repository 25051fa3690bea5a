"""Which devices multiply a precision."""

from typing import get_args

import pytest
import torch

from bert_unpad._capability import LEAST_CAPABILITY, multiplies
from bert_unpad._choices import Precision


@pytest.mark.parametrize(
    ("capability", "precisions"),
    [
        ((7, 0), set()),
        ((7, 5), {"fp32", "fp16"}),
        ((8, 0), {"fp32", "fp16", "bf16"}),
        ((8, 6), {"fp32", "fp16", "bf16"}),
        ((8, 9), {"fp32", "fp16", "bf16", "fp8"}),
        ((12, 0), {"fp32", "fp16", "bf16", "fp8"}),
    ],
)
def test_a_gpu_multiplies_by_its_capability(capability, precisions, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    gpu = torch.device("cuda", 0)
    assert {name for name in LEAST_CAPABILITY if multiplies(gpu, name)} == precisions


def test_other_devices_multiply_every_precision():
    assert set(LEAST_CAPABILITY) == set(get_args(Precision))
    assert all(multiplies(torch.device("cpu"), name) for name in LEAST_CAPABILITY)
