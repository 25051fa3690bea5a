"""The CUDA kernels of the operators over lists of tensors, run on the model of a block."""

from __future__ import annotations

import ctypes
import dataclasses

import pytest
import torch
from torch import Tensor

from gpu_model import build
from gpu_model.block_model import POLICIES, Model
from tests.support.model_checks import DTYPES, assert_every_site_is_needed
from tests.support.optim_reference import Rule, State, Truth, draw_state
from tests.support.seeds import derived

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
CHUNK = 1 << 14  # kBlockElements
# Two chunks and a bit; less than a vector; nothing; a whole number of vectors.
SIZES = [(2 * CHUNK + 5,), (3,), (0,), (64,)]
# More tensors than a launch takes.
MANY = [(1 + i % 5,) for i in range(70)]


@pytest.fixture(scope="module")
def model():
    return Model(build.load(build.KERNELS / "optim.cpp"))


def _register(model: Model, tensors: list[Tensor], writable: bool = True) -> None:
    for tensor in tensors:
        if tensor.numel():
            model.register(tensor, writable)


def _pointers(tensors: list[Tensor | None]) -> ctypes.Array:
    values = [None if t is None else t.data_ptr() for t in tensors]
    return (ctypes.c_void_p * len(values))(*values)


def _numbers(values: list[int]) -> ctypes.Array:
    return (ctypes.c_int64 * len(values))(*values)


def _chunks(tensors: list[Tensor]) -> int:
    return sum(-(-t.numel() // CHUNK) for t in tensors)


def norms(model: Model, tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    model.clear()
    _register(model, tensors, writable=False)
    total, each = torch.full((1,), torch.nan), torch.full((len(tensors),), torch.nan)
    partials = torch.full((_chunks(tensors),), torch.nan)
    _register(model, [total, each, partials])
    sizes = _numbers([t.numel() for t in tensors])
    kinds = _numbers([DTYPES[t.dtype] for t in tensors])
    lists = (len(tensors), _pointers(tensors), sizes, kinds)
    model.call("optim_norm", *lists, partials, total, each)
    return total, each


def update(model: Model, state: State, grads: list[Tensor], rule: Rule, check: bool = False) -> int:
    """One step of the kernels; returns how many were skipped."""
    total, each = norms(model, grads)
    model.clear()
    masters: list[Tensor | None] = list(state.masters) or [None] * len(grads)
    columns = (state.params, grads, state.exp_avgs, state.exp_avg_sqs, masters, state.steps)
    arrays = [tensor for row in zip(*columns, strict=True) for tensor in row]
    _register(model, grads, writable=False)
    _register(model, state.everything())
    scalars = [torch.tensor([rule.lr]), torch.tensor([rule.grad_scale]), total, each]
    _register(model, scalars, writable=False)
    count = len(grads)
    skipped = torch.zeros(1, dtype=torch.int64)
    scratch = [torch.full((count, 4), torch.nan), torch.full((_chunks(grads), 3), torch.nan)]
    sums = torch.full((count, 3), torch.nan)
    _register(model, [skipped, *scratch, sums])
    numbers = (*rule.betas, rule.eps, rule.weight_decay, rule.max_grad_norm)
    flags = (rule.decoupled, rule.bias_correction, rule.grad_averaging)
    ratio = 2 if rule.kind == "stable" else rule.trust_ratio
    flags += (ratio, rule.nesterov, rule.maximize)
    sizes = _numbers([g.numel() for g in grads])
    model.call(
        *("optim_update", count, _pointers(arrays), sizes),
        *(DTYPES[state.params[0].dtype], DTYPES[grads[0].dtype]),
        *((ctypes.c_double * 5)(*numbers), _numbers([int(flag) for flag in flags])),
        *(scalars[0], scalars[1], total if check or rule.max_grad_norm else None),
        *(each if rule.nesterov else None, skipped, *scratch),
        None if rule.kind == "adam" else sums,
    )
    return int(skipped)


@pytest.mark.parametrize("sizes", [SIZES, MANY], ids=["chunks", "many"])
def test_norms(model, sizes):
    torch.manual_seed(derived(0))
    kinds = list(DTYPES)
    tensors = [torch.randn(size).to(kinds[i % 3]) for i, size in enumerate(sizes)]
    exact = torch.stack([t.double().norm() for t in tensors])
    results = []
    for policy in POLICIES:
        model.configure(policy, seed=1)
        total, each = norms(model, tensors)
        torch.testing.assert_close(each.double(), exact, rtol=1e-6, atol=0)
        torch.testing.assert_close(total[0].double(), exact.norm(), rtol=1e-6, atol=0)
        results.append(torch.cat([total, each]))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scale(model, dtype):
    torch.manual_seed(derived(1))
    tensors = [torch.randn(size).to(dtype) for size in SIZES]
    want = [(t.float() * 0.37).to(dtype) for t in tensors]
    factor = torch.tensor([0.37])
    model.configure("uniform", seed=1)
    model.clear()
    _register(model, [*tensors, factor])
    sizes = _numbers([t.numel() for t in tensors])
    kinds = _numbers([DTYPES[dtype]] * len(tensors))
    model.call("optim_scale", len(tensors), _pointers(tensors), sizes, kinds, factor)
    assert all(torch.equal(a, b) for a, b in zip(tensors, want, strict=True))


ADAM = Rule("adam", weight_decay=0.1)
LAMB = Rule("lamb", weight_decay=0.1)
STABLE = Rule("stable", weight_decay=0.1)
CASES = {
    "adamw": (ADAM, SIZES, torch.float32, torch.float32),
    "l2": (dataclasses.replace(ADAM, decoupled=False), MANY, torch.float32, torch.float16),
    "clipped": (dataclasses.replace(ADAM, max_grad_norm=0.5), MANY, torch.bfloat16, torch.float32),
    "adam, bf16": (ADAM, SIZES, torch.bfloat16, torch.bfloat16),
    "lamb": (LAMB, SIZES, torch.float32, torch.float32),
    "lamb, fp16": (LAMB, [(200,), (7,)], torch.float16, torch.float16),
    "lamb, many": (dataclasses.replace(LAMB, max_grad_norm=1.0), MANY, *[torch.float32] * 2),
    "lans": (dataclasses.replace(LAMB, nesterov=True), [(200,), (7,)], *[torch.float32] * 2),
    "stable": (STABLE, SIZES, torch.float32, torch.float32),
    "stable, many": (dataclasses.replace(STABLE, max_grad_norm=1.0), MANY, *[torch.bfloat16] * 2),
}


@pytest.mark.parametrize("case", CASES)
def test_updates(model, case):
    rule, sizes, param, grad = CASES[case]
    results = []
    for policy in POLICIES:
        model.configure(policy, seed=2)
        state = draw_state(sizes, param, masters=param != torch.float32)
        truth = Truth(state.masters or state.params, rule)
        generator = torch.Generator().manual_seed(derived(3))
        for scale in (1.0, 3.0):
            grads = [(torch.randn(size, generator=generator) * scale).to(grad) for size in sizes]
            truth.step(grads)
            assert update(model, state, grads, rule) == 0
        for got, want in zip(state.masters or state.params, truth.params, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=5e-6)
        for weight, master in zip(state.params, state.masters, strict=False):
            assert torch.equal(weight, master.to(param))
        results.append(torch.cat([t.float().flatten() for t in state.everything()]))
    assert all(torch.equal(result, results[0]) for result in results)


def test_unaligned_tensors(model):
    """Addresses that allow no 16-byte loads, and sizes that leave a rest."""
    state = draw_state([(130,), (130,)], torch.bfloat16, masters=True)
    rule = LAMB
    truth = Truth(state.masters, rule)
    for tensors in (state.params, state.masters, state.exp_avgs):
        store = torch.empty(131, dtype=tensors[0].dtype)
        store[1:] = tensors[0]
        tensors[0] = store[1:]
    grads = [torch.randn(130) for _ in range(2)]
    truth.step(grads)
    model.configure()
    update(model, state, grads, rule)
    for got, want in zip(state.masters, truth.params, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("rule", [ADAM, LAMB, STABLE], ids=["adam", "lamb", "stable"])
def test_what_is_not_finite_skips_the_step(model, rule):
    model.configure()
    state = draw_state([(100,), (3,)], torch.bfloat16, masters=True)
    grads = [torch.randn(100), torch.randn(3)]
    grads[1][0] = torch.inf
    before = [t.clone() for t in state.everything()]
    assert update(model, state, grads, rule, check=True) == 1
    assert all(torch.equal(a, b) for a, b in zip(before, state.everything(), strict=True))
    grads[1][0] = 1.0
    assert update(model, state, grads, rule, check=True) == 0
    assert state.steps[0] == 1


@pytest.mark.parametrize("rule", [LAMB, STABLE], ids=["lamb", "stable"])
def test_every_barrier_is_needed(model, rule):
    def run() -> None:
        state = draw_state([(600,)], torch.float32)
        update(model, state, [torch.ones(600)], rule)

    sites = assert_every_site_is_needed(model, run)
    assert sites
    assert {site.kind for site in sites} == {"sync_block"}
