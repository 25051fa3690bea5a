"""1-bit Adam, 1-bit LAMB and 0/1 Adam on real ranks, against simulations of their papers."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bert_unpad.optim import FusedAdam
from tests.support import one_bit_ranks
from tests.support.one_bit_ranks import (
    DECAYED,
    UNTRAINED,
    Simulation,
    gradient,
    lr_of,
    simulate_surely,
    start,
)
from tests.support.one_bit_runs import FREEZE, OPTIMIZERS, STEPS, Run
from tests.support.processes import run_ranks

CASES = [
    *((kind, 0.0, {}) for kind in OPTIMIZERS),
    *((kind, 0.1, {}) for kind in OPTIMIZERS),
    ("onebit_adam", 0.1, {"bias_correction": False}),
]


def _run_cases(rank: int, world_size: int, draws: list[int]) -> list[dict[str, Any]]:
    results = []
    for (kind, decay, options), draw in zip(CASES, draws, strict=True):
        run = Run(kind, decay, **options)
        history = []
        for step in range(STEPS):
            run.step(step, draw=draw)
            history.append(run.weights())
        states = run.optimizer.state
        results.append(
            {
                "history": history,
                "momenta": [states[p]["exp_avg"] for p in run.params],
                "variances": [states[p]["exp_avg_sq"] for p in run.params],
                "errors": run.optimizer.local_state(),
                "skipped": run.optimizer.skipped_steps,
            }
        )
    return results


@pytest.fixture(scope="module", params=[2, 3])
def trained(request) -> tuple[list[Simulation], list[list[dict[str, Any]]]]:
    """What is expected, by case; and what the optimizers did, by rank, by case."""
    draws, wanted = zip(
        *(
            simulate_surely(
                *(kind, request.param, STEPS, FREEZE, decay),
                options.get("bias_correction", True),
            )
            for kind, decay, options in CASES
        ),
        strict=True,
    )
    return list(wanted), run_ranks(_run_cases, request.param, list(draws))


def _close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want, rtol=2e-4, atol=2e-4 * float(want.abs().max()))


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{k}-{d}-{o}" for k, d, o in CASES])
def test_every_step_is_that_of_the_paper(trained, number):
    want = trained[0][number]
    for rank, results in enumerate(trained[1]):
        got = results[number]
        assert got["skipped"] == 0
        if rank == 0:
            for step in range(STEPS):
                _close(got["history"][step], want.history[step])
        for i in range(len(one_bit_ranks.SHAPES)):
            _close(got["momenta"][i], want.momenta[rank][i])
            _close(got["variances"][i], want.variances[i])
        _close(got["errors"]["worker_error"], want.signs.worker[rank])
        if rank < len(want.signs.server):
            _close(got["errors"]["server_error"], want.signs.server[rank])


def test_ranks_have_the_same_bits_where_they_meet(trained):
    for number, (kind, _, _) in enumerate(CASES):
        for step in range(STEPS):
            steps = [results[number]["history"][step] for results in trained[1]]
            same = all(torch.equal(other, steps[0]) for other in steps)
            # 0/1 Adam's intervals: 1 up to step 8, then 2, then 4.
            alone = kind == "zero_one_adam" and (step + 1) % (
                1 if step < 9 else 2 if step < 13 else 4
            )
            assert same == (not alone), (kind, step)


def test_weights_without_a_gradient_stay(trained):
    number = CASES.index(("onebit_adam", 0.0, {}))
    offset = start()[0].numel()
    untrained = start()[1][-UNTRAINED:].flatten()
    end = offset + start()[1].numel()
    for results in trained[1]:
        got = results[number]["history"][-1][end - untrained.numel() : end]
        assert torch.equal(got, untrained)


def _fused_adam_history() -> Tensor:
    params = [nn.Parameter(w) for w in start()]
    groups = [
        {"params": params[:DECAYED], "weight_decay": 0.1},
        {"params": params[DECAYED:], "weight_decay": 0.0},
    ]
    optimizer = FusedAdam(groups, betas=(0.9, 0.99), eps=1e-6)
    for step in range(FREEZE):
        for group in optimizer.param_groups:
            group["lr"] = lr_of(step)
        for param, grad in zip(
            params, gradient([p.detach() for p in params], 0, step), strict=True
        ):
            param.grad = grad
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in params])


def test_the_warm_up_is_fused_adam():
    run = Run("onebit_adam")
    for step in range(FREEZE):
        run.step(step)
    assert torch.equal(run.weights(), _fused_adam_history())


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_one_rank_compresses_nothing(kind):
    """As if the average of one rank were exact: 0/1 Adam's local steps add up to whole ones."""
    run = Run(kind)
    for step in range(STEPS):
        run.step(step)
    assert run.optimizer.bytes_sent == 0
    assert run.optimizer.local_state() is None
    before = run.weights()
    run.optimizer.synchronise()
    assert torch.equal(run.weights(), before)
    assert before.isfinite().all()


BAD_STEPS = {7: math.inf, 11: math.nan, 15: "found_inf"}


def _with_bad_steps(rank: int, world_size: int) -> dict[str, list[bool]]:
    """Whether each step of a run changed anything; only rank 1 has something bad."""
    results = {}
    for kind in OPTIMIZERS:
        run = Run(kind)
        changed = []
        for step in range(STEPS):
            before, bad = run.everything(), BAD_STEPS.get(step)
            if bad == "found_inf":
                run.optimizer.found_inf = torch.tensor([float(rank == 1)])
                bad = None
            run.step(step, bad if rank == 1 else None)
            run.optimizer.found_inf = None
            after = run.everything()
            grown = len(after) > len(before)  # by errors, in the first compressed step
            same = [torch.equal(a, b) for a, b in zip(before, after, strict=False)]
            changed.append(grown or not all(same))
        assert all(tensor.isfinite().all() for tensor in run.everything())
        assert run.optimizer.updates == STEPS
        results[kind] = changed
        results[f"{kind}, skipped"] = run.optimizer.skipped_steps
    return results


def test_what_is_not_finite_on_one_rank_is_left_out_by_all():
    """All bad steps of 0/1 Adam end an interval; in others each rank would decide for itself."""
    for results in run_ranks(_with_bad_steps, 2):
        for kind in OPTIMIZERS:
            assert results[kind] == [step not in BAD_STEPS for step in range(STEPS)], kind
            assert results[f"{kind}, skipped"] == len(BAD_STEPS)
