"""The energy counter of a real GPU."""

import time

import pytest
import torch

from tests.support.cuda_checks import GPU_ONLY

pytest.importorskip("pynvml")

from bert_unpad.pretrain.output.energy import EnergyMeter
from bert_unpad.pretrain.ranks import Ranks

pytestmark = GPU_ONLY


def test_a_gpu_counts_the_energy_of_its_work():
    device = torch.device("cuda", 0)
    meter = EnergyMeter(Ranks(0, 1, device, None), None)
    if "gpu" in meter.missing:
        pytest.skip(meter.missing["gpu"])
    matrix = torch.randn(4096, 4096, device=device)
    found, begin = [0.0], time.perf_counter()
    for _ in range(3):
        end = time.perf_counter() + 0.5
        while time.perf_counter() < end:
            torch.mm(matrix, matrix)
            torch.cuda.synchronize(device)
        found.append(meter.joules()["gpu"])
    watts = found[-1] / (time.perf_counter() - begin)
    assert found == sorted(found)
    assert 5 < watts < 3000
    meter.close()
