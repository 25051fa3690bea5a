"""Operators over lists of tensors and the optimizers on a GPU: values, streams, graphs, errors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bert_unpad import ops
from bert_unpad.optim import FusedAdam, FusedLAMB, FusedStableAdamW
from tests.support.cuda_checks import (
    DTYPES,
    GPU_ONLY,
    assert_runs_on_the_current_stream,
    assert_same_bits,
    raise_if_the_host_waits,
)
from tests.support.optim_reference import Rule, Truth, draw_state
from tests.support.seeds import derived

pytestmark = GPU_ONLY
# Below and above a vector and a block's 16,384 elements; nothing at all; an address that is no
# multiple of 16 bytes comes with `unaligned`.
SIZES = [(1,), (5,), (0,), (3, 77), (129, 300), (70_001,)]
# More tensors than one launch takes (64), and than one launch of steps (256).
MANY = [(1 + i % 37,) for i in range(300)]
PAIRS = [
    *((torch.float32, dtype) for dtype in DTYPES),
    *((dtype, dtype) for dtype in DTYPES[1:]),
    *((dtype, torch.float32) for dtype in DTYPES[1:]),
]
RULES = {
    "adamw": Rule("adam", weight_decay=0.1),
    "l2, ascending": Rule("adam", weight_decay=0.1, decoupled=False, maximize=True),
    "clipped": Rule("adam", max_grad_norm=0.5, grad_scale=2.0, bias_correction=False),
    "lamb": Rule("lamb", weight_decay=0.1, max_grad_norm=1.0, grad_scale=0.5),
    "lamb, sums": Rule("lamb", grad_averaging=False, bias_correction=False, maximize=True),
    "lans": Rule("lamb", weight_decay=0.1, nesterov=True),
    "stable": Rule("stable", weight_decay=0.1, max_grad_norm=1.0, grad_scale=0.5),
}


def draw(sizes, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(derived(seed))
    return [torch.randn(size, generator=generator).to("cuda", dtype) for size in sizes]


def unaligned(tensors: list[Tensor]) -> list[Tensor]:
    """The same values one element behind an address that is a multiple of 16 bytes."""
    return [torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) for t in tensors]


def assert_close(got: list[Tensor], want: list[Tensor], atol: float = 2e-6) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.detach().double(), b.double(), rtol=2e-7, atol=atol)


class TestNormAndScale:
    @pytest.mark.sanitizer
    @pytest.mark.parametrize("dtype", [*DTYPES, None])
    @pytest.mark.parametrize("aligned", [True, False])
    def test_norm_in_total_and_of_each(self, dtype, aligned):
        kinds = [dtype] * len(SIZES) if dtype else DTYPES * 2
        tensors = [t.to(kind) for t, kind in zip(draw(SIZES), kinds, strict=True)]
        if not aligned:
            tensors = unaligned(tensors)
        total, each = ops.multi_tensor_l2norm(tensors)
        exact = torch.stack([t.double().norm() for t in tensors])
        torch.testing.assert_close(each.double(), exact, rtol=1e-6, atol=0)
        torch.testing.assert_close(total.double(), exact.norm(), rtol=1e-6, atol=0)

    def test_norms_of_many_tensors(self):
        tensors = draw(MANY * 3)  # more than one launch sums up (512)
        total, each = ops.multi_tensor_l2norm(tensors)
        exact = torch.stack([t.double().norm() for t in tensors])
        torch.testing.assert_close(each.double(), exact, rtol=1e-6, atol=0)
        torch.testing.assert_close(total.double(), exact.norm(), rtol=1e-6, atol=0)

    @pytest.mark.parametrize("value", [float("inf"), float("nan")])
    def test_norm_keeps_what_is_not_finite(self, value):
        tensors = [torch.ones(40_000, device="cuda"), torch.ones(33, device="cuda")]
        tensors[1][32] = value
        total, each = ops.multi_tensor_l2norm(tensors)
        assert not total.isfinite()
        assert each.isfinite().tolist() == [True, False]

    @pytest.mark.sanitizer
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("aligned", [True, False])
    def test_scale(self, dtype, aligned):
        tensors = draw(SIZES, dtype, seed=1)
        if not aligned:
            tensors = unaligned(tensors)
        want = [(t.float() * 0.37).to(dtype) for t in tensors]
        ops.multi_tensor_scale_(tensors, torch.tensor(0.37, device="cuda"))
        assert_same_bits(tensors, want)

    def test_current_stream(self):
        (x,) = draw([(100_000,)])

        def run(operand: Tensor) -> list[Tensor]:
            mine = operand.clone()
            ops.multi_tensor_scale_([mine], torch.full((), 0.5, device="cuda"))
            return [mine, *ops.multi_tensor_l2norm([mine])]

        assert_runs_on_the_current_stream(run, x)


class TestUpdates:
    @pytest.mark.parametrize("name", RULES)
    @pytest.mark.parametrize("aligned", [True, False])
    def test_ten_steps_against_float64(self, name, aligned):
        state = draw_state(SIZES, torch.float32, device="cuda")
        if not aligned:
            for key in ("params", "exp_avgs", "exp_avg_sqs"):
                setattr(state, key, unaligned(getattr(state, key)))
        truth = Truth(state.params, RULES[name])
        for step in range(10):
            grads = draw(SIZES, seed=10 + step)
            truth.step(grads)
            state.step(grads, RULES[name])
        # Where decay and gradient cancel, L2 divides a rounding error by a root as small.
        assert_close(state.params, truth.params, 1e-5 if name.startswith("l2") else 2e-6)
        for got, want in zip(state.exp_avg_sqs, truth.second, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-12)
        assert all(step == 10 for step in state.steps)

    @pytest.mark.sanitizer
    @pytest.mark.parametrize(("param", "grad"), PAIRS)
    @pytest.mark.parametrize("rule", ["adamw", "lamb", "lans", "stable"])
    def test_16_bit_weights_are_roundings_of_their_masters(self, rule, param, grad):
        state = draw_state(SIZES, param, masters=param != torch.float32, device="cuda")
        truth = Truth(state.masters or state.params, RULES[rule])
        for step in range(2):
            grads = draw(SIZES, grad, seed=step)
            truth.step(grads)
            state.step(grads, RULES[rule])
        assert_close(state.masters or state.params, truth.params)
        for weight, master in zip(state.params, state.masters, strict=False):
            assert torch.equal(weight, master.to(param))

    @pytest.mark.parametrize("rule", ["adamw", "lamb", "lans", "stable"])
    def test_more_tensors_than_a_launch_takes(self, rule):
        state = draw_state(MANY, torch.float32, device="cuda")
        truth = Truth(state.params, RULES[rule])
        for step in range(3):
            grads = draw(MANY, seed=step)
            truth.step(grads)
            state.step(grads, RULES[rule])
        assert_close(state.params, truth.params)
        assert all(step == 3 for step in state.steps)

    @pytest.mark.parametrize("rule", ["adamw", "lamb", "lans", "stable"])
    def test_agrees_with_the_cpu(self, rule):
        on_gpu = draw_state(SIZES, torch.float32, device="cuda")
        on_cpu = draw_state(SIZES, torch.float32)
        for step in range(5):
            grads = draw(SIZES, seed=step)
            on_gpu.step(grads, RULES[rule])
            on_cpu.step([g.cpu() for g in grads], RULES[rule])
        for a, b in zip(on_gpu.params, on_cpu.params, strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=1e-6, atol=2e-6)

    @pytest.mark.sanitizer
    @pytest.mark.parametrize("rule", ["adamw", "lamb", "lans", "stable"])
    @pytest.mark.parametrize("value", [float("inf"), float("nan")])
    def test_what_is_not_finite_skips_the_step(self, rule, value):
        state = draw_state(SIZES, torch.bfloat16, masters=True, device="cuda")
        state.step(draw(SIZES), RULES[rule])
        before = [t.clone() for t in state.everything()]
        grads = draw(SIZES, seed=1)
        grads[4][3, 5] = value
        skipped = torch.zeros((), dtype=torch.int64, device="cuda")
        for count in (1, 2):
            state.step(grads, RULES[rule], skipped=skipped, check=True)
            assert skipped == count
            assert_same_bits(before, state.everything())
        state.step(draw(SIZES, seed=2), RULES[rule], skipped=skipped, check=True)
        assert skipped == 2
        assert not torch.equal(before[-1], state.everything()[-1])

    @pytest.mark.parametrize("rule", ["lamb", "lans", "stable"])
    def test_halves_are_the_whole(self, rule):
        one, other = (draw_state(SIZES, torch.float32, device="cuda") for _ in range(2))
        for step in range(2):
            one.step(draw(SIZES, seed=step), RULES[rule])
            other.step(draw(SIZES, seed=step), RULES[rule], halves=True)
        assert_same_bits(one.everything(), other.everything())

    @pytest.mark.parametrize("rule", ["adamw", "lamb", "lans", "stable"])
    def test_same_bits_every_time(self, rule):
        def run() -> list[Tensor]:
            state = draw_state([*SIZES, (2_000_003,)], torch.float32, device="cuda")
            for step in range(2):
                state.step(draw([p.shape for p in state.params], seed=step), RULES[rule])
            return [*state.everything(), *ops.multi_tensor_l2norm(state.params)]

        want = run()
        for _ in range(3):
            assert_same_bits(run(), want)

    @pytest.mark.parametrize("rule", ["adamw", "lamb", "stable"])
    def test_current_stream(self, rule):
        sizes = [(300, 700), (5,)]
        (gradient,) = draw([sizes[0]], seed=3)

        def run(operand: Tensor) -> list[Tensor]:
            state = draw_state(sizes, torch.float32, device="cuda")
            state.step([operand, operand.flatten()[:5].clone()], RULES[rule])
            return state.everything()

        assert_runs_on_the_current_stream(run, gradient)

    @pytest.mark.parametrize("function", [ops.adam_, ops.lamb_, ops.stable_adamw_])
    def test_wrong_devices_are_named(self, function):
        def fresh() -> dict:
            (p, g, m, v), step = draw([(4,)] * 4), torch.zeros((), device="cuda")
            lists = {"params": [p], "grads": [g], "exp_avgs": [m], "exp_avg_sqs": [v]}
            return {**lists, "steps": [step], "lr": torch.full((), 0.1, device="cuda")}

        changes = {
            "grads": r"grads\[0\] must be on the same device",
            "exp_avgs": r"exp_avgs\[0\] must be on the same device",
            "steps": r"steps\[0\] must be on the same device",
        }
        for name, message in changes.items():
            arguments = fresh()
            arguments[name] = [t.cpu() for t in arguments[name]]
            with pytest.raises(RuntimeError, match=message):
                function(**arguments)
        with pytest.raises(RuntimeError, match="lr must be on the same device"):
            function(**(fresh() | {"lr": torch.tensor(0.1)}))


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(t) for t in draw([(40, 300), (30,), (7, 11)], dtype)]


def set_gradients(params: list[nn.Parameter], step: int) -> None:
    """Into tensors that stay, as a captured graph needs them."""
    for p, g in zip(params, draw([p.shape for p in params], seed=100 + step), strict=True):
        if p.grad is None:
            p.grad = torch.empty_like(p)
        p.grad.copy_(g)


def state_of(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> list[Tensor]:
    states = [value for p in params for _, value in sorted(optimizer.state[p].items())]
    return [*(p.detach() for p in params), *states]


KINDS = {
    "adam": lambda params, **more: FusedAdam(params, eps=1e-6, **more),
    "lamb": lambda params, **more: FusedLAMB(params, **more),
    "lans": lambda params, **more: FusedLAMB(params, nesterov=True, **more),
    "stable": lambda params, **more: FusedStableAdamW(params, **more),
}


class TestOptimizers:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("masters", [False, True])
    def test_steps_against_float64(self, kind, masters):
        params = parameters(torch.bfloat16 if masters else torch.float32)
        options = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
        rule = Rule(
            "lamb" if kind == "lans" else kind,
            **options,
            max_grad_norm=1.0 if kind == "lamb" else 0.0,
            nesterov=kind == "lans",
        )
        truth = Truth(params, rule)
        optimizer = KINDS[kind](params, **options, master_weights=masters)
        for step in range(20):
            set_gradients(params, step)
            truth.step([p.grad for p in params])
            optimizer.step()
        weights = [optimizer.state[p]["master_param"] for p in params] if masters else params
        assert_close(weights, truth.params, 1e-5)

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_captured_step_takes_new_gradients_rates_and_step_numbers(self, kind):
        params, peers = parameters(), parameters()
        rate = torch.full((), 1e-3, device="cuda")
        ours = KINDS[kind](params, lr=rate, skip_non_finite=True)
        peer = KINDS[kind](peers, lr=1e-3, skip_non_finite=True)
        set_gradients(params, 0)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            ours.step()  # makes the state
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ours.step()
        set_gradients(peers, 0)
        peer.step()
        for step, lr in ((1, 1e-3), (2, 5e-4), (3, 2e-3)):
            rate.fill_(lr)
            peer.param_groups[0]["lr"] = lr
            for some in (params, peers):
                set_gradients(some, step)
                if step == 2:  # left out, in the graph too
                    some[1].grad[3] = torch.nan
            graph.replay()
            peer.step()
        assert_same_bits(state_of(ours, params), state_of(peer, peers))
        assert (ours.skipped_steps, peer.skipped_steps) == (1, 1)
        assert all(ours.state[p]["step"] == 3 for p in params)

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_step_does_not_wait_for_the_device(self, kind):
        params = parameters()
        set_gradients(params, 0)
        optimizer = KINDS[kind](params, lr=1e-3, skip_non_finite=True)
        optimizer.step()
        with raise_if_the_host_waits():
            optimizer.step()

    def test_the_scaler_leaves_a_step_out(self):
        params = parameters()
        optimizer = FusedAdam(params, lr=1e-3)
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
        scaler.scale(torch.ones((), device="cuda"))
        set_gradients(params, 0)
        params[0].grad[1, 1] = torch.inf
        before = [p.detach().clone() for p in params]
        scaler.step(optimizer)
        scaler.update()
        assert_same_bits([p.detach() for p in params], before)
        assert optimizer.skipped_steps == 1
        assert scaler.get_scale() == 512.0
