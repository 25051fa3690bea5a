"""Packed signs, updates by a frozen variance, and the optimizers on them, on a GPU."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor, nn

from bert_unpad import ops
from bert_unpad.experimental import ZeroOneAdam
from bert_unpad.optim import OneBitAdam, OneBitLAMB
from tests.support.cuda_checks import GPU_ONLY, assert_runs_on_the_current_stream
from tests.support.frozen_reference import BETAS, EPS, FrozenRule, draw, frozen_adam, frozen_lamb
from tests.support.optim_reference import State
from tests.support.seeds import derived

built = pytest.mark.skipif(find_spec("bert_unpad._C_cuda") is None, reason="built without nvcc")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPERATORS = ("sign_scale", "sign_pack_", "sign_mean_", "sign_unpack_", "frozen_adam_")
OPERATORS += ("frozen_lamb_sums_",)


@built
def test_kernels_are_built_and_registered():
    """In its own process: elsewhere the CUDA module is loaded under a CUDA PyTorch only."""
    code = f"""
import torch, bert_unpad
from bert_unpad import _C_cuda
for op in {OPERATORS}:
    print(torch._C._dispatch_has_kernel_for_dispatch_key(f"bert_unpad::{{op}}", "CUDA"))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert out.stdout.split() == ["True"] * len(OPERATORS)


class TestSigns:
    pytestmark = GPU_ONLY

    def test_current_stream(self):
        assert_runs_on_the_current_stream(
            lambda error: [ops.sign_scale(None, error)], torch.randn(1 << 20, device="cuda")
        )


def _on_gpu(state: State) -> State:
    for name in ("params", "masters", "exp_avgs", "exp_avg_sqs", "steps"):
        setattr(state, name, [tensor.cuda() for tensor in getattr(state, name)])
    return state


class TestFrozen:
    pytestmark = GPU_ONLY

    @pytest.mark.sanitizer
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("averaged", [False, True])
    def test_frozen_adam(self, dtype: torch.dtype, averaged: bool):
        sizes = [(2 * 16384 + 5,), (3,), (0,), *[(64,)] * 70]
        rule = FrozenRule(averaged=averaged, lr=tuple(0.01 * (1 + i % 2) for i in range(73)))
        state = draw(sizes, dtype, masters=dtype != torch.float32)
        grads = [torch.randn(p.shape) for p in state.params]
        weights, momenta = frozen_adam(state, grads, rule)
        state = _on_gpu(state)
        ops.frozen_adam_(
            state.params,
            [grad.cuda() for grad in grads],
            *(state.exp_avgs, state.exp_avg_sqs, state.steps),
            masters=state.masters,
            lr=torch.tensor(rule.lr).cuda(),
            grad_scale=torch.tensor(rule.grad_scale).cuda(),
            betas=BETAS,
            eps=EPS,
            weight_decay=rule.weight_decay,
            averaged=averaged,
        )
        got: list[Tensor] = state.masters or state.params
        for i, want in enumerate(weights):
            torch.testing.assert_close(got[i].cpu().double(), want, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(
                state.exp_avgs[i].cpu().double(), momenta[i], rtol=1e-5, atol=1e-6
            )

    @pytest.mark.sanitizer
    def test_frozen_lamb_sums(self):
        state = draw([(2 * 16384 + 5,), (3,), (0,), *[(64,)] * 70], torch.float32, masters=False)
        fresh = [torch.rand(p.shape) + 0.05 for p in state.params]
        momenta = [torch.randn(p.shape) for p in state.params]
        lists = (state.params, momenta, state.exp_avgs, state.exp_avg_sqs)
        wanted = [frozen_lamb(*row, 0.1) for row in zip(*lists, fresh, strict=True)]
        fresh = [tensor.cuda() for tensor in fresh]
        sums = ops.frozen_lamb_sums_(
            *([tensor.cuda() for tensor in tensors] for tensors in lists),
            fresh,
            **{"betas": BETAS, "eps": EPS, "weight_decay": 0.1},
        )
        for i, (want, variance) in enumerate(wanted):
            torch.testing.assert_close(sums[i].cpu().double(), want, rtol=2e-5, atol=0)
            torch.testing.assert_close(fresh[i].cpu().double(), variance, rtol=1e-5, atol=1e-7)


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
