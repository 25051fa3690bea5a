"""The CUDA kernels of updates by a frozen variance, run on the model of a block."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from torch import Tensor

from gpu_model import build
from gpu_model.block_model import POLICIES, Model
from tests.support.frozen_reference import (
    BETAS,
    EPS,
    FrozenRule,
    draw,
    frozen_adam,
    frozen_lamb,
)
from tests.support.model_checks import DTYPES, assert_every_site_is_needed
from tests.support.optim_reference import State
from tests.support.seeds import derived

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
CHUNK = 1 << 14  # kBlockElements
F32, BF16, F16 = DTYPES
CASES = [(F32, F32, False), (F32, BF16, False), (BF16, BF16, False), (F16, F32, True)]
# Two chunks and a bit; less than a vector; nothing; a whole number of vectors.
SIZES = [(2 * CHUNK + 5,), (3,), (0,), (64,)]
# More tensors than a launch takes.
MANY = [(1 + i % 5,) for i in range(70)]


@pytest.fixture(scope="module")
def model():
    return Model(build.load(build.KERNELS / "optim.cpp"))


def register(model: Model, tensors: list[Tensor], writable: bool = True) -> None:
    for tensor in tensors:
        if tensor.numel():
            model.register(tensor, writable)


def pointers(columns: list[list[Tensor | None]]) -> ctypes.Array:
    values = [
        None if t is None else t.data_ptr() for row in zip(*columns, strict=True) for t in row
    ]
    return (ctypes.c_void_p * len(values))(*values)


def numbers(values: list[int]) -> ctypes.Array:
    return (ctypes.c_int64 * len(values))(*values)


def step(model: Model, state: State, grads: list[Tensor], rule: FrozenRule, norm=None) -> int:
    """One step of the kernels; returns how many were skipped."""
    model.clear()
    count = len(grads)
    masters: list[Tensor | None] = list(state.masters) or [None] * count
    columns = [state.params, grads, state.exp_avgs, state.exp_avg_sqs, masters, state.steps]
    register(model, [*grads, *state.exp_avg_sqs], writable=False)
    register(model, [*state.params, *state.exp_avgs, *state.masters, *state.steps])
    lr = torch.tensor(rule.lr).reshape(-1)
    counted = rule.variance_step
    variance_step = None if counted is None else torch.tensor([float(counted)])
    scale = torch.tensor([rule.grad_scale])
    register(model, [t for t in (lr, variance_step, scale, norm) if t is not None], writable=False)
    skipped, rows = torch.zeros(1, dtype=torch.int64), torch.full((count, 4), math.nan)
    register(model, [skipped, rows])
    flags = [len(lr) > 1, rule.averaged, rule.bias_correction]
    model.call(
        *("optim_frozen_adam", count, pointers(columns), numbers([g.numel() for g in grads])),
        *(DTYPES[state.params[0].dtype], DTYPES[grads[0].dtype]),
        (ctypes.c_double * 4)(*BETAS, EPS, rule.weight_decay),
        *(numbers([int(flag) for flag in flags]), lr, variance_step, scale, norm, skipped, rows),
    )
    return int(skipped)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("sizes", [SIZES, MANY], ids=["chunks", "many"])
def test_frozen_adam(model, sizes, case):
    param, grad, masters = case
    rates = tuple(0.01 * (1 + i % 3) for i in range(len(sizes)))
    for rule in (FrozenRule(), FrozenRule(averaged=True, lr=rates, variance_step=3)):
        results = []
        for policy in POLICIES:
            model.configure(policy, seed=1)
            state = draw(sizes, param, masters)
            generator = torch.Generator().manual_seed(derived(7))
            grads = [torch.randn(p.shape, generator=generator).to(grad) for p in state.params]
            weights, momenta = frozen_adam(state, grads, rule)
            assert step(model, state, grads, rule) == 0
            got = state.masters or state.params
            rtol = 1e-5 if masters else max(1e-5, torch.finfo(param).eps)
            for i, want in enumerate(weights):
                torch.testing.assert_close(got[i].double(), want, rtol=rtol, atol=rtol)
                assert state.exp_avgs[i].double().sub(momenta[i]).abs().sum() <= 1e-5 * len(want)
                assert float(state.steps[i]) == 5
            results.append(torch.cat([t.float().flatten() for t in state.everything()]))
        assert all(torch.equal(result, results[0]) for result in results)


def test_a_step_that_is_left_out_changes_nothing(model):
    model.configure()
    state = draw(SIZES, F32, False)
    before = [t.clone() for t in state.everything()]
    grads = [torch.full(p.shape, math.nan) for p in state.params]
    assert step(model, state, grads, FrozenRule(), torch.tensor([math.nan])) == 1
    assert all(torch.equal(a, b) for a, b in zip(before, state.everything(), strict=True))


def sums_of(model: Model, state: State, momenta, fresh, decay: float, norm=None) -> Tensor:
    model.clear()
    sizes = [m.numel() for m in momenta]
    sums = torch.full((len(sizes), 3), math.nan)
    partials = torch.full((sum(-(-size // CHUNK) for size in sizes), 3), math.nan)
    read = [*state.params, *momenta, *state.exp_avgs, *state.exp_avg_sqs]
    register(model, [*read, *([] if norm is None else [norm])], writable=False)
    register(model, [*fresh, sums, partials])
    columns = [state.params, momenta, state.exp_avgs, state.exp_avg_sqs, fresh, state.steps]
    model.call(
        *("optim_frozen_lamb_sums", len(sizes), pointers(columns), numbers(sizes)),
        *(DTYPES[state.params[0].dtype], (ctypes.c_double * 4)(*BETAS, EPS, decay)),
        *(norm, partials, sums),
    )
    return sums


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [SIZES, MANY], ids=["chunks", "many"])
def test_frozen_lamb_sums(model, sizes, dtype):
    results = []
    for policy in POLICIES:
        model.configure(policy, seed=1)
        state = draw(sizes, dtype, False)
        generator = torch.Generator().manual_seed(derived(7))
        momenta = [torch.randn(p.shape, generator=generator) for p in state.params]
        fresh = [torch.rand(p.shape, generator=generator) + 0.05 for p in state.params]
        lists = (state.params, momenta, state.exp_avgs, state.exp_avg_sqs, fresh)
        wanted = [frozen_lamb(*row, 0.1) for row in zip(*lists, strict=True)]
        sums = sums_of(model, state, momenta, fresh, 0.1)
        for i, (want, variance) in enumerate(wanted):
            torch.testing.assert_close(sums[i].double(), want, rtol=2e-5, atol=0)
            torch.testing.assert_close(fresh[i].double(), variance, rtol=1e-5, atol=1e-7)
        results.append(sums)
    assert all(torch.equal(result, results[0]) for result in results)


def test_sums_of_a_step_that_is_left_out(model):
    model.configure()
    state, fresh = draw([(300,)], F32, False), [torch.ones(300)]
    sums = sums_of(model, state, [torch.randn(300)], fresh, 0.1, torch.tensor([math.inf]))
    assert torch.equal(sums, torch.zeros(1, 3))
    assert torch.equal(fresh[0], torch.ones(300))


def test_every_barrier_is_needed(model):
    state, fresh = draw([(600,)], F32, False), [torch.ones(600)]
    momenta = [torch.randn(600)]
    sites = assert_every_site_is_needed(
        model, lambda: sums_of(model, state, momenta, fresh, 0.1), seeds=range(3)
    )
    assert [site.kind for site in sites] == ["sync_block"] * 2
