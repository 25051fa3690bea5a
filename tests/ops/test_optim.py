"""Norm, scaling, Adam, LAMB and StableAdamW over lists of tensors, against float64."""

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from bert_unpad import ops
from tests.support.backends import Backend, unaligned
from tests.support.optim_reference import Rule, Truth, draw_state, rms
from tests.support.seeds import derived

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Below and above a vector, a strip and a chunk of 32,768 elements; nothing at all.
SIZES = [(1,), (5,), (0,), (3, 77), (129, 300), (70_001,)]
# The same of a block's 16,384 elements: two chunks and a bit.
FEWER = [(1,), (5,), (0,), (3, 77), (4, 40), (2 * 16384 + 5,)]
# More tensors than one launch takes (64), and than one launch of steps (256).
MANY = [(1 + i % 37,) for i in range(300)]
PAIRS = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float16, torch.float32),
]


@pytest.fixture
def sizes(backend: Backend) -> list[tuple[int, ...]]:
    return FEWER if backend.name in ("block", "ptx") else SIZES


def draw(backend: Backend, sizes, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return backend.put([torch.randn(size).to(dtype) for size in sizes])


def assert_norms(tensors: list[Tensor]) -> None:
    total, each = ops.multi_tensor_l2norm(tensors)
    exact = torch.stack([t.double().norm() for t in tensors])
    torch.testing.assert_close(each.double(), exact, rtol=1e-6, atol=0)
    torch.testing.assert_close(total.double(), exact.norm(), rtol=1e-6, atol=0)


@pytest.mark.sanitizer
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("dtype", [*DTYPES, None])
def test_norm_in_total_and_of_each(
    backend: Backend, sizes, dtype: torch.dtype | None, shift: int
) -> None:
    torch.manual_seed(derived(0))
    kinds = [dtype] * len(sizes) if dtype else DTYPES * 2
    drawn = zip(draw(backend, sizes), kinds, strict=True)
    assert_norms([unaligned(t.to(kind), shift) for t, kind in drawn])


def test_norms_of_many_tensors(backend: Backend) -> None:
    assert_norms(draw(backend, MANY * 3))  # more than one launch sums up (512)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_norm_keeps_what_is_not_finite(backend: Backend, value: float) -> None:
    tensors = backend.put([torch.ones(40_000), torch.ones(33)])
    tensors[1][32] = value
    total, each = ops.multi_tensor_l2norm(tensors)
    assert not total.isfinite()
    assert each.isfinite().tolist() == [True, False]


@pytest.mark.sanitizer
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scale(backend: Backend, sizes, dtype: torch.dtype, shift: int) -> None:
    torch.manual_seed(derived(1))
    tensors = [unaligned(t, shift) for t in draw(backend, sizes, dtype)]
    want = [(t.float() * 0.37).to(dtype) for t in tensors]
    ops.multi_tensor_scale_(tensors, backend.put(torch.tensor(0.37)))
    assert all(torch.equal(a, b) for a, b in zip(tensors, want, strict=True))


RULES = {
    "adamw": Rule("adam", weight_decay=0.1),
    "l2, ascending": Rule("adam", weight_decay=0.1, decoupled=False, maximize=True),
    "no bias correction": Rule("adam", bias_correction=False, grad_scale=0.25),
    "clipped": Rule("adam", max_grad_norm=0.5, grad_scale=2.0),
    "lamb": Rule("lamb", weight_decay=0.1, max_grad_norm=1.0, grad_scale=0.5),
    "lamb, sums": Rule("lamb", grad_averaging=False, bias_correction=False, maximize=True),
    "no trust ratio": Rule("lamb", weight_decay=0.1, trust_ratio=False),
    "lans": Rule("lamb", weight_decay=0.1, nesterov=True),
    "stable": Rule("stable", weight_decay=0.1),
    "stable, clipped": Rule("stable", max_grad_norm=0.5, grad_scale=2.0, maximize=True),
}


FORMS = ["adamw", "lamb", "lans", "stable"]


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("name", RULES)
def test_ten_steps_against_float64(backend: Backend, sizes, name: str, shift: int) -> None:
    torch.manual_seed(derived(2))
    state = draw_state(sizes, torch.float32, device=backend.device)
    for key in ("params", "exp_avgs", "exp_avg_sqs"):
        setattr(state, key, [unaligned(t, shift) for t in getattr(state, key)])
    truth = Truth(state.params, RULES[name])
    for _ in range(10):
        grads = draw(backend, sizes)
        truth.step(grads)
        state.step(grads, RULES[name])
    for got, start, want in zip(state.params, state.start, truth.params, strict=True):
        # Where decay and gradient, each of 0.3, cancel, to 1e-5 in the worst of 70,000 numbers, L2
        # divides their two roundings by what is left: 4e-3 of a step of 0.01.
        close = 4e-5 if name.startswith("l2") else 2e-6
        torch.testing.assert_close(got.double(), want, rtol=2e-7, atol=close)
        if got.numel() > 100:
            assert (got - start).abs().median() > 1e-3
    for got, want in zip(state.exp_avg_sqs, truth.second, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-12)
    assert all(step == 10 for step in state.steps)


@pytest.mark.parametrize(("param", "grad"), PAIRS)
@pytest.mark.parametrize("rule", FORMS)
@pytest.mark.sanitizer
def test_16_bit_weights_are_roundings_of_their_masters(
    backend: Backend, sizes, rule: str, param: torch.dtype, grad: torch.dtype
) -> None:
    torch.manual_seed(derived(3))
    masters = param != torch.float32
    state = draw_state(sizes, param, masters=masters, device=backend.device)
    truth = Truth(state.masters or state.params, RULES[rule])
    for _ in range(4):
        grads = draw(backend, sizes, grad)
        truth.step(grads)
        state.step(grads, RULES[rule])
    for got, want in zip(state.masters or state.params, truth.params, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2e-7, atol=2e-6)
    for weight, master in zip(state.params, state.masters, strict=False):
        assert torch.equal(weight, master.to(param))


@pytest.mark.parametrize("rule", FORMS)
def test_more_tensors_than_a_launch_takes(backend: Backend, rule: str) -> None:
    # Only LANS looks up something by the number of a tensor in its launch of steps.
    few = backend.name in ("block", "ptx") and rule != "lans"
    many = MANY[:70] if few else MANY
    state = draw_state(many, torch.float32, device=backend.device)
    truth = Truth(state.params, RULES[rule])
    for _ in range(3):
        grads = draw(backend, many)
        truth.step(grads)
        state.step(grads, RULES[rule])
    for got, want in zip(state.params, truth.params, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2e-7, atol=2e-6)
    assert all(step == 3 for step in state.steps)


@pytest.mark.parametrize("rule", ["adamw", "lamb", "stable"])
@pytest.mark.parametrize("param", [torch.bfloat16, torch.float16])
def test_without_masters_a_step_is_rounded_once(
    backend: Backend, sizes, rule: str, param: torch.dtype
) -> None:
    torch.manual_seed(derived(4))
    state = draw_state(sizes, param, device=backend.device)
    truth = Truth(state.params, RULES[rule])
    grads = draw(backend, sizes, param)
    truth.step(grads)
    state.step(grads, RULES[rule])
    for got, want in zip(state.params, truth.params, strict=True):
        torch.testing.assert_close(
            got.double(), want, rtol=0.51 * torch.finfo(param).eps, atol=1e-6
        )


@pytest.mark.sanitizer
@pytest.mark.parametrize("rule", FORMS)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_skips_the_step(
    backend: Backend, sizes, rule: str, value: float
) -> None:
    torch.manual_seed(derived(5))
    state = draw_state(sizes, torch.bfloat16, masters=True, device=backend.device)
    state.step(draw(backend, sizes), RULES[rule])
    before = [t.clone() for t in state.everything()]
    grads = draw(backend, sizes)
    grads[4][3, 5] = value
    skipped = backend.put(torch.zeros((), dtype=torch.int64))
    for count in (1, 2):
        state.step(grads, RULES[rule], skipped=skipped, check=True)
        assert skipped == count
        assert all(torch.equal(a, b) for a, b in zip(before, state.everything(), strict=True))
    state.step(draw(backend, sizes), RULES[rule], skipped=skipped, check=True)
    assert skipped == 2
    assert not torch.equal(before[-1], state.everything()[-1])


@pytest.mark.parametrize("rule", ["lamb", "lans", "stable"])
def test_halves_are_the_whole(backend: Backend, sizes, rule: str) -> None:
    torch.manual_seed(derived(6))
    one, other = (draw_state(sizes, torch.float32, seed=7, device=backend.device) for _ in range(2))
    for _ in range(2):
        grads = draw(backend, sizes)
        one.step(grads, RULES[rule])
        other.step(grads, RULES[rule], halves=True)
    assert all(torch.equal(a, b) for a, b in zip(one.everything(), other.everything(), strict=True))


def test_gradients_that_grow_lower_the_learning_rate(backend: Backend, sizes) -> None:
    torch.manual_seed(derived(10))
    rule = RULES["stable"]
    state = draw_state(sizes, torch.float32, device=backend.device)
    truth = Truth(state.params, rule)
    for step in range(4):
        # All but the second tensor: a rate for each. Of 0.75 to 1.25 of a scale, so that the ratio
        # of a growing element is sqrt(3.94 / (1 + 1 / 6**2)) or more, that of another 1.4 or less.
        grads = [
            torch.empty(size).uniform_(0.75, 1.25)
            * (1 - 2 * torch.randint(2, size))
            * (1 if i == 1 else 10**step)
            for i, size in enumerate(sizes)
        ]
        grads = backend.put(grads)
        truth.step(grads)
        state.step(grads, rule)
    second = [v / (1 - rule.betas[1] ** 4) for v in truth.second]
    found = [rms(g.double(), v, rule.eps) for g, v in zip(grads, second, strict=True) if len(g)]
    assert min(found[:1] + found[2:]) > 1.7
    assert found[1] < 1.5
    for got, want in zip(state.params, truth.params, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2e-7, atol=2e-6)


def test_second_moments_below_eps_squared_count_as_that(backend: Backend) -> None:
    rule = Rule("stable", eps=1e-2)
    state = draw_state([(300,)], torch.float32, device=backend.device)
    truth = Truth(state.params, rule)
    for scale in (0.0, 1e-3, 3e-2):  # the second gradient alone would have a ratio of 10
        grads = backend.put([torch.full((300,), scale)])
        truth.step(grads)
        state.step(grads, rule)
        assert state.params[0].isfinite().all()
        torch.testing.assert_close(state.params[0].double(), truth.params[0], rtol=0, atol=1e-6)


def test_zero_weights_and_gradients_have_a_ratio_of_one(backend: Backend) -> None:
    state = draw_state([(40,), (40,)], torch.float32, device=backend.device)
    state.params[0].zero_()
    rule = Rule("lamb", weight_decay=0.0)
    grads = backend.put([torch.randn(40), torch.zeros(40)])
    truth = Truth(state.params, rule)
    truth.step(grads)
    state.step(grads, rule)
    for got, want in zip(state.params, truth.params, strict=True):
        assert got.isfinite().all()
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rule", FORMS)
def test_same_bits_every_time(backend: Backend, sizes, rule: str) -> None:
    more = {"cpu": [(200_000,)], "cuda": [(2_000_003,)]}.get(backend.name, [])

    def run() -> list[Tensor]:
        torch.manual_seed(derived(8))
        state = draw_state([*sizes, *more], torch.float32, seed=9, device=backend.device)
        for _ in range(2):
            state.step(draw(backend, [p.shape for p in state.params]), RULES[rule])
        return [*state.everything(), *ops.multi_tensor_l2norm(state.params)]

    backend.assert_same_bits(run)


@pytest.mark.backends("cuda")
@pytest.mark.parametrize("rule", FORMS)
def test_agrees_with_the_cpu(backend: Backend, rule: str) -> None:
    on_gpu = draw_state(SIZES, torch.float32, device=backend.device)
    on_cpu = draw_state(SIZES, torch.float32)
    for _ in range(5):
        grads = [torch.randn(size) for size in SIZES]
        on_gpu.step(backend.put(grads), RULES[rule])
        on_cpu.step(grads, RULES[rule])
    for a, b in zip(on_gpu.params, on_cpu.params, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-6, atol=2e-6)


def test_nothing_to_do() -> None:
    ops.adam_([], [], [], [], [], lr=torch.tensor(0.1))
    ops.lamb_([], [], [], [], [], lr=torch.tensor(0.1))
    ops.stable_adamw_([], [], [], [], [], lr=torch.tensor(0.1))
    ops.multi_tensor_scale_([], torch.tensor(2.0))


def test_no_tensors_are_refused() -> None:
    norm = torch.tensor(1.0)
    with pytest.raises(RuntimeError, match="frozen_lamb_sums_: params must not be empty"):
        torch.ops.bert_unpad.frozen_lamb_sums_([], [], [], [], [], norm, 0.9, 0.99, 1e-8, 0.0)


def test_opcheck() -> None:
    state = draw_state([(3, 5), (7,)], torch.float32)
    grads = [torch.randn(p.shape) for p in state.params]
    lists = (state.params, grads, state.exp_avgs, state.exp_avg_sqs)
    lr, norm = torch.tensor(0.1), torch.tensor(1.0)
    skipped = torch.zeros((), dtype=torch.int64)
    numbers = (0.9, 0.999, 1e-6, 0.1)
    op = torch.ops.bert_unpad
    opcheck(op.multi_tensor_l2norm, (grads,))
    opcheck(op.multi_tensor_scale_, (grads, lr))
    rest = (lr, norm, norm, skipped, *numbers, 1.0, True, True, False)
    opcheck(op.adam_, (*lists, [], state.steps, *rest))
    rest = (lr, norm, norm, None, skipped, *numbers, 1.0, True, True, True, False, False)
    opcheck(op.lamb_, (*lists, [], state.steps, *rest))
    rest = (*rest[:-3], *rest[-2:])
    opcheck(op.lamb_moments_, (*lists, [], state.steps, *rest))
    sums, coefficients = op.lamb_moments_(*lists, [], state.steps, *rest)
    opcheck(op.lamb_apply_, (*lists, [], sums, coefficients, 0.9, 1e-6, 0.1, True, False))
    rest = (lr, norm, norm, skipped, *numbers, 1.0, False)
    opcheck(op.stable_adamw_, (*lists, [], state.steps, *rest))
    opcheck(op.stable_adamw_moments_, (*lists, [], state.steps, *rest))
    sums, coefficients = op.stable_adamw_moments_(*lists, [], state.steps, *rest)
    opcheck(op.stable_adamw_apply_, (*lists, [], sums, coefficients, 1e-6, 0.1))


@pytest.mark.backends("cpu", "cuda")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"params": [torch.zeros(4).double()]},
            r"params\[0\] must be float32, bfloat16 or float16",
        ),
        ({"params": [torch.zeros(2, 4).t()]}, r"params\[0\] must be contiguous"),
        ({"grads": []}, "grads must have as many tensors as params, 1, got 0"),
        ({"grads": [torch.zeros(5)]}, r"grads\[0\] must have the shape of params\[0\], \[4\]"),
        ({"exp_avgs": [torch.zeros(4).half()]}, r"exp_avgs\[0\] must be float32"),
        ({"exp_avg_sqs": [torch.zeros(3)]}, r"exp_avg_sqs\[0\] must have the shape"),
        ({"masters": [torch.zeros(4)]}, "masters are for parameters of 16 bits"),
        ({"steps": [torch.zeros(2)]}, r"steps\[0\] must have one element, got \[2\]"),
        ({"lr": torch.tensor(1, dtype=torch.int64)}, "lr must be float32"),
        ({"skipped": torch.zeros(())}, "skipped must be int64"),
        ({"betas": (1.0, 0.9)}, r"beta1 must be in \[0, 1\), got 1"),
        ({"eps": -1.0}, "eps must be >= 0, got -1"),
        ({"max_grad_norm": 1.0}, "max_grad_norm needs norm"),
    ],
)
def test_bad_arguments_are_named(backend: Backend, change: dict, message: str) -> None:
    for function in (ops.adam_, ops.lamb_, ops.stable_adamw_):
        with pytest.raises(RuntimeError, match=message):
            function(**backend.put(good_arguments() | change))


def good_arguments() -> dict:
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs")
    lists = {name: [torch.zeros(4)] for name in names}
    return {**lists, "steps": [torch.zeros(())], "lr": torch.tensor(0.1)}


@pytest.mark.backends("cuda")
@pytest.mark.parametrize("name", ["grads", "exp_avgs", "steps", "lr"])
@pytest.mark.parametrize("function", [ops.adam_, ops.lamb_, ops.stable_adamw_])
def test_another_device_is_named(backend: Backend, function, name: str) -> None:
    given = good_arguments()
    with pytest.raises(RuntimeError, match=rf"{name}(\[0\])? must be on the same device"):
        function(**backend.put(given) | {name: given[name]})


def test_other_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="tensors must not be empty"):
        ops.multi_tensor_l2norm([])
    with pytest.raises(RuntimeError, match=r"tensors\[1\] must be contiguous"):
        ops.multi_tensor_l2norm([torch.zeros(2), torch.zeros(4, 4).t()[1:]])
    with pytest.raises(RuntimeError, match="factor must be float32"):
        ops.multi_tensor_scale_([torch.zeros(2)], torch.tensor(1))
    state = draw_state([(4,)], torch.float32)
    with pytest.raises(RuntimeError, match="grad_norms go with nesterov"):
        ops.lamb_(
            *(state.params, state.params, state.exp_avgs, state.exp_avg_sqs, state.steps),
            lr=torch.tensor(0.1),
            nesterov=True,
        )
