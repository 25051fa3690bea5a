"""Optimizers by packed signs and a frozen variance on a GPU."""

import pytest
import torch
from torch import nn

from bert_unpad import ops
from bert_unpad.experimental import ZeroOneAdam
from bert_unpad.optim import OneBitAdam, OneBitLAMB
from tests.support.cuda_checks import GPU_ONLY, assert_runs_on_the_current_stream
from tests.support.seeds import derived


class TestSigns:
    pytestmark = GPU_ONLY

    def test_current_stream(self):
        assert_runs_on_the_current_stream(
            lambda error: [ops.sign_scale(None, error)], torch.randn(1 << 20, device="cuda")
        )


@pytest.mark.parametrize("kind", [OneBitAdam, OneBitLAMB, ZeroOneAdam])
class TestOptimizers:
    pytestmark = GPU_ONLY

    def test_steps_are_those_of_a_cpu(self, kind):
        results = []
        for device in ("cpu", "cuda"):
            torch.manual_seed(derived(0))
            model = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 24)).to(device)
            more = {"local_step_scaler": 4} if kind is ZeroOneAdam else {}
            optimizer = kind(model.parameters(), lr=1e-2, freeze_step=4, **more)
            draw_inputs = torch.Generator().manual_seed(derived(1))
            for _ in range(16):
                x = torch.randn(8, 24, generator=draw_inputs).to(device)
                (model(x) - x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            optimizer.synchronise()
            results.append(torch.cat([p.detach().cpu().flatten() for p in model.parameters()]))
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)
