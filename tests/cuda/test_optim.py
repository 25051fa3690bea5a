"""Operators over lists of tensors on streams, and the optimizers on a GPU."""

import pytest
import torch
from torch import Tensor, nn

from bert_unpad import ops
from bert_unpad.optim import FusedAdam, FusedLAMB, FusedStableAdamW
from tests.support.cuda_checks import (
    GPU_ONLY,
    assert_runs_on_the_current_stream,
    assert_same_bits,
    raise_if_the_host_waits,
)
from tests.support.optim_reference import Rule, Truth, draw_state
from tests.support.seeds import derived

pytestmark = GPU_ONLY
RULES = {
    "adamw": Rule("adam", weight_decay=0.1),
    "lamb": Rule("lamb", weight_decay=0.1, max_grad_norm=1.0, grad_scale=0.5),
    "stable": Rule("stable", weight_decay=0.1, max_grad_norm=1.0, grad_scale=0.5),
}


def draw(sizes, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(derived(seed))
    return [torch.randn(size, generator=generator).to("cuda", dtype) for size in sizes]


class TestStreams:
    def test_norm_and_scale(self):
        (x,) = draw([(100_000,)])

        def run(operand: Tensor) -> list[Tensor]:
            mine = operand.clone()
            ops.multi_tensor_scale_([mine], torch.full((), 0.5, device="cuda"))
            return [mine, *ops.multi_tensor_l2norm([mine])]

        assert_runs_on_the_current_stream(run, x)

    @pytest.mark.parametrize("rule", RULES)
    def test_updates(self, rule):
        sizes = [(300, 700), (5,)]
        (gradient,) = draw([sizes[0]], seed=3)

        def run(operand: Tensor) -> list[Tensor]:
            state = draw_state(sizes, torch.float32, device="cuda")
            state.step([operand, operand.flatten()[:5].clone()], RULES[rule])
            return state.everything()

        assert_runs_on_the_current_stream(run, gradient)


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
        for got, want in zip(weights, truth.params, strict=True):
            torch.testing.assert_close(got.detach().double(), want, rtol=2e-7, atol=1e-5)

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
