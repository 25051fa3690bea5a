"""Updates by a variance that no longer changes, against float64."""

import math

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from bert_unpad import ops
from tests.support.backends import Backend
from tests.support.frozen_reference import (
    BETAS,
    EPS,
    FrozenRule,
    draw,
    frozen_adam,
    frozen_lamb,
)
from tests.support.op_checks import assert_same_bits_whatever_the_threads, results_of_every_isa
from tests.support.optim_reference import State
from tests.support.seeds import derived

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Parameters, gradients, master weights.
CASES = [
    *((dtype, dtype, False) for dtype in DTYPES),
    *((torch.float32, torch.bfloat16, False), (torch.bfloat16, torch.float32, True)),
    *((torch.bfloat16, torch.bfloat16, True), (torch.float16, torch.float32, True)),
]
# Several chunks of 32768 elements, or of a block's 16384; less than a vector; nothing; two
# dimensions.
SIZES = [(2 * 32768 + 5,), (3,), (0,), (7, 9)]
FEWER = [(2 * 16384 + 5,), *SIZES[1:]]
# More tensors than a launch takes.
MANY = [(1 + i % 5,) for i in range(70)]


@pytest.fixture
def sizes(backend: Backend) -> list[tuple[int, ...]]:
    return FEWER if backend.name in ("block", "ptx") else SIZES


def on(backend: Backend, state: State) -> State:
    for name in ("params", "masters", "exp_avgs", "exp_avg_sqs", "steps"):
        setattr(state, name, backend.put(getattr(state, name)))
    return state


def gradients(state: State, dtype: torch.dtype) -> list[Tensor]:
    device = state.params[0].device
    return [torch.randn(p.shape).to(device, dtype) for p in state.params]


def run(
    state: State, grads: list[Tensor], rule: FrozenRule, norm=None, skipped=None, eps: float = EPS
) -> None:
    counted, device = rule.variance_step, state.params[0].device
    ops.frozen_adam_(
        *(state.params, grads, state.exp_avgs, state.exp_avg_sqs, state.steps),
        masters=state.masters,
        lr=torch.tensor(rule.lr, device=device),
        variance_step=None if counted is None else torch.tensor(float(counted), device=device),
        grad_scale=torch.tensor(rule.grad_scale, device=device),
        norm=norm,
        skipped=skipped,
        betas=BETAS,
        eps=eps,
        weight_decay=rule.weight_decay,
        averaged=rule.averaged,
        bias_correction=rule.bias_correction,
    )


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(
    "rule",
    [
        FrozenRule(),
        FrozenRule(averaged=True, variance_step=3),
        FrozenRule(lr=(0.01, 0.02, 0.03, 0.04), bias_correction=False),
    ],
    ids=["gradient", "average", "rates"],
)
@pytest.mark.sanitizer
def test_frozen_adam(backend: Backend, sizes, case, rule: FrozenRule) -> None:
    param, grad, masters = case
    state = on(backend, draw(sizes, param, masters))
    check_frozen_adam(state, gradients(state, grad), rule)


def test_more_tensors_than_a_launch_takes(backend: Backend) -> None:
    rates = tuple(0.01 * (1 + i % 3) for i in range(len(MANY)))
    state = on(backend, draw(MANY, torch.float32, False))
    check_frozen_adam(state, gradients(state, torch.float32), FrozenRule(lr=rates))


def check_frozen_adam(state: State, grads: list[Tensor], rule: FrozenRule) -> None:
    param, masters = state.params[0].dtype, bool(state.masters)
    weights, momenta = frozen_adam(state, grads, rule)
    variances = [v.clone() for v in state.exp_avg_sqs]
    run(state, grads, rule)
    assert [float(step) for step in state.steps] == [5.0] * len(grads)
    for i, want in enumerate(weights):
        torch.testing.assert_close(state.exp_avgs[i].double(), momenta[i], rtol=1e-5, atol=1e-6)
        assert torch.equal(state.exp_avg_sqs[i], variances[i])
        if masters:
            torch.testing.assert_close(state.masters[i].double(), want, rtol=1e-5, atol=1e-6)
            assert torch.equal(state.params[i], state.masters[i].to(param))
        else:
            rtol = max(1e-5, torch.finfo(param).eps)
            torch.testing.assert_close(state.params[i].double(), want, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("eps", [EPS, 0.0])
def test_a_weight_without_a_variance_only_decays(backend: Backend, eps: float) -> None:
    state = on(backend, draw([(9,)], torch.float32, False))
    before = state.params[0].clone()
    run(state, gradients(state, torch.float32), FrozenRule(), eps=eps)
    without = state.exp_avg_sqs[0] == 0
    assert without.any()
    torch.testing.assert_close(state.params[0][without], before[without] * (1 - 0.01 * 0.1))
    assert not torch.isclose(state.params[0], before * (1 - 0.01 * 0.1))[~without].any()


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_step_that_is_left_out_changes_nothing(backend: Backend, sizes, bad: float) -> None:
    state = on(backend, draw(sizes, torch.bfloat16, True))
    before = [t.clone() for t in state.everything()]
    norm, skipped = backend.put((torch.tensor(bad), torch.zeros((), dtype=torch.int64)))
    grads = [torch.full_like(g, bad) for g in gradients(state, torch.float32)]
    run(state, grads, FrozenRule(), norm, skipped)
    assert int(skipped) == 1
    assert all(torch.equal(a, b) for a, b in zip(before, state.everything(), strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.sanitizer
def test_frozen_lamb_sums(
    backend: Backend, sizes, many: bool, dtype: torch.dtype, decay: float
) -> None:
    state = on(backend, draw(MANY if many else sizes, dtype, False))
    momenta = gradients(state, torch.float32)
    fresh = backend.put([torch.rand(p.shape) + 0.05 for p in state.params])
    lists = (state.params, momenta, state.exp_avgs, state.exp_avg_sqs)
    wanted = [frozen_lamb(*row, decay) for row in zip(*lists, fresh, strict=True)]
    before = [t.clone() for t in state.everything()]
    sums = ops.frozen_lamb_sums_(*lists, fresh, betas=BETAS, eps=EPS, weight_decay=decay)
    assert all(torch.equal(a, b) for a, b in zip(before, state.everything(), strict=True))
    for i, (want, variance) in enumerate(wanted):
        torch.testing.assert_close(sums[i].double(), want, rtol=2e-5, atol=0)
        torch.testing.assert_close(fresh[i].double(), variance, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_sums_of_a_step_that_is_left_out(backend: Backend, bad: float) -> None:
    state = on(backend, draw([(300,)], torch.float32, False))
    momenta, fresh, norm = backend.put(
        ([torch.full((300,), bad)], [torch.ones(300)], torch.tensor(bad))
    )
    lists = (state.params, momenta, state.exp_avgs, state.exp_avg_sqs)
    sums = ops.frozen_lamb_sums_(*lists, fresh, norm=norm)
    assert sums.shape == (1, 3)
    assert not sums.any()
    assert torch.equal(fresh[0], torch.ones_like(fresh[0]))


def _run() -> list[Tensor]:
    torch.manual_seed(derived(0))
    results = []
    for param, grad, masters in CASES:
        state = draw(SIZES, param, masters)
        run(state, gradients(state, grad), FrozenRule())
        results += state.everything()
    state = draw(SIZES, torch.float32, False)
    fresh = [torch.rand(p.shape) + 0.05 for p in state.params]
    lists = (state.params, gradients(state, torch.float32), state.exp_avgs, state.exp_avg_sqs)
    return [*results, ops.frozen_lamb_sums_(*lists, fresh), *fresh]


def test_same_bits_every_time(backend: Backend, sizes) -> None:
    def step() -> list[Tensor]:
        torch.manual_seed(derived(2))
        state = on(backend, draw(sizes, torch.float32, False))
        run(state, gradients(state, torch.float32), FrozenRule())
        fresh = backend.put([torch.rand(p.shape) + 0.05 for p in state.params])
        lists = (state.params, gradients(state, torch.float32), state.exp_avgs, state.exp_avg_sqs)
        return [*state.everything(), ops.frozen_lamb_sums_(*lists, fresh), *fresh]

    backend.assert_same_bits(step)


def test_same_bits_whatever_the_threads():
    assert_same_bits_whatever_the_threads(_run)


def test_all_instruction_sets_agree():
    results = results_of_every_isa(_run)
    first = results.pop("generic")
    for isa, tensors in results.items():
        for a, b in zip(first, tensors, strict=True):
            if a.numel():
                unit = torch.finfo(a.dtype).eps * (2 if a.dtype != torch.float32 else 20)
                assert (a.double() - b.double()).abs().max() <= unit * a.abs().max(), isa


def test_opcheck():
    f = torch.ops.bert_unpad
    two = [torch.rand(3), torch.rand(2, 2)]
    steps, one = [torch.ones(()), torch.ones(())], torch.ones(())
    lists = [[t.clone() for t in two] for _ in range(4)]
    options = (0.9, 0.99, 1e-6, 0.1, True, True)
    opcheck(f.frozen_adam_, (*lists, [], steps, one, one, one, one, None, *options))
    opcheck(f.frozen_adam_, (*lists, [], steps, None, torch.ones(2), None, None, None, *options))
    opcheck(f.frozen_lamb_sums_, (*lists, [t.clone() for t in two], one, 0.9, 0.99, 1e-6, 0.1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": torch.ones(3)}, r"lr must have one element, got \[3\]"),
        ({"lr": torch.ones(2).double()}, "lr must be float32"),
        ({"variance_step": torch.ones(2)}, "variance_step must have one element"),
        ({"grads": [torch.ones(4)]}, "grads must have as many tensors as params, 2, got 1"),
        ({"masters": [torch.ones(4)] * 2}, "masters are for parameters of 16 bits"),
        ({"betas": (0.9, 1.0)}, r"beta2 must be in \[0, 1\), got 1"),
    ],
)
def test_bad_input_is_named(change, message):
    lists = {name: [torch.ones(4), torch.ones(3)] for name in ("params", "grads", "exp_avgs")}
    lists |= {"exp_avg_sqs": [torch.ones(4), torch.ones(3)], "steps": [torch.ones(())] * 2}
    with pytest.raises(RuntimeError, match=f"frozen_adam_: {message}"):
        ops.frozen_adam_(**lists | {"lr": torch.ones(())} | change)


def test_bad_lists_of_sums_are_named():
    two = [torch.ones(4), torch.ones(3)]
    with pytest.raises(ValueError, match="params must not be empty"):
        ops.frozen_lamb_sums_([], [], [], [], [])
    with pytest.raises(RuntimeError, match=r"fresh_sqs\[1\] must have the shape of params\[1\]"):
        ops.frozen_lamb_sums_(two, two, two, two, [torch.ones(4), torch.ones(2)])
