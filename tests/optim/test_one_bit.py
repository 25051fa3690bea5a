"""1-bit Adam, 1-bit LAMB and 0/1 Adam on real ranks, against simulations of their papers."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from bert_unpad.optim import FusedAdam, OneBitAdam, OneBitLAMB, ZeroOneAdam
from bert_unpad.optim.one_bit import OneBitOptimizer
from tests.support import one_bit_ranks
from tests.support.one_bit_ranks import DECAYED, UNTRAINED, gradient, lr_of, simulate, start
from tests.support.processes import run_ranks

FREEZE, STEPS = 5, 19
OPTIMIZERS: dict[str, Callable[..., OneBitOptimizer]] = {
    "onebit_adam": OneBitAdam,
    "onebit_lamb": OneBitLAMB,
    "zero_one_adam": ZeroOneAdam,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "onebit_adam": {},
    "onebit_lamb": {"coeff_beta": 0.6},
    "zero_one_adam": {"var_update_scaler": 2, "local_step_scaler": 4, "local_step_clipper": 4},
}
CASES = [
    *((kind, 0.0, {}) for kind in OPTIMIZERS),
    *((kind, 0.1, {}) for kind in OPTIMIZERS),
    ("onebit_adam", 0.1, {"bias_correction": False}),
]


class Run:
    """One rank's parameters and optimizer, and its steps."""

    def __init__(
        self,
        kind: str,
        decay: float = 0.1,
        dtype: torch.dtype = torch.float32,
        freeze: int = FREEZE,
        **options: Any,
    ) -> None:
        self.params = [nn.Parameter(w.to(dtype)) for w in start()]
        groups = [
            {"params": self.params[:DECAYED], "weight_decay": decay},
            {"params": self.params[DECAYED:], "weight_decay": 0.0},
        ]
        options = {"betas": (0.9, 0.99), "eps": 1e-6, "freeze_step": freeze} | options
        self.optimizer = OPTIMIZERS[kind](groups, **OPTIONS[kind], **options)
        self.rank = dist.get_rank() if dist.is_initialized() else 0

    def step(self, step: int, bad: float | None = None) -> None:
        """A step with the gradient of `gradient`; `bad` is put into it."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr_of(step)
        weights = [p.detach() for p in self.params]
        for param, grad in zip(self.params, gradient(weights, self.rank, step), strict=True):
            param.grad = grad
            if bad is not None:
                param.grad.view(-1)[0] = bad
            if self.optimizer.averages_gradients and dist.is_initialized():
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        self.optimizer.step()

    def everything(self) -> list[Tensor]:
        """Copies of all that a step may change."""
        found = [p.detach() for p in self.params]
        for param in self.params:
            found += [value for _, value in sorted(self.optimizer.state[param].items())]
        found += list((self.optimizer.local_state() or {}).values())
        return [tensor.clone() for tensor in found]

    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.params]).float()


def _run_cases(rank: int, world_size: int) -> list[dict[str, Any]]:
    results = []
    for kind, decay, options in CASES:
        run = Run(kind, decay, **options)
        history = []
        for step in range(STEPS):
            run.step(step)
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
def trained(request) -> list[list[dict[str, Any]]]:
    """By rank, by case."""
    return run_ranks(_run_cases, request.param)


def _close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want, rtol=2e-4, atol=2e-4 * float(want.abs().max()))


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{k}-{d}-{o}" for k, d, o in CASES])
def test_every_step_is_that_of_the_paper(trained, number):
    kind, decay, options = CASES[number]
    ranks = len(trained)
    want = simulate(kind, ranks, STEPS, FREEZE, decay, options.get("bias_correction", True))
    # Else rounding could turn a sign; then take other noise in `gradient`.
    assert want.signs.nearest > 1e-5
    for rank, results in enumerate(trained):
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
            steps = [results[number]["history"][step] for results in trained]
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
    for results in trained:
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


def _resume(rank: int, world_size: int, kind: str, at: int) -> bool:
    whole, first = Run(kind), Run(kind)
    for step in range(at):
        whole.step(step)
        first.step(step)
    for run in (whole, first):
        run.optimizer.synchronise()
    buffer = io.BytesIO()
    params = [p.detach() for p in first.params]
    torch.save([params, first.optimizer.state_dict(), first.optimizer.local_state()], buffer)
    buffer.seek(0)
    params, state, local = torch.load(buffer, weights_only=True)
    second = Run(kind)
    for param, value in zip(second.params, params, strict=True):
        param.data.copy_(value)
    second.optimizer.load_state_dict(state)
    if local is not None:
        second.optimizer.load_local_state(local)
    for step in range(at, STEPS):
        whole.step(step)
        second.step(step)
    return all(
        torch.equal(a, b) for a, b in zip(whole.everything(), second.everything(), strict=True)
    )


def _resumes(rank: int, world_size: int) -> dict[tuple[str, int], bool]:
    # Before and at the end of the warm-up, in the middle, and within an interval of 0/1 Adam.
    return {(k, at): _resume(rank, world_size, k, at) for k in OPTIMIZERS for at in (3, 5, 9, 14)}


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_resumed_run_goes_on_with_the_same_bits(ranks):
    for results in run_ranks(_resumes, ranks):
        assert all(results.values()), results


def _save(rank: int, world_size: int, kind: str) -> tuple[list[Tensor], dict]:
    run = Run(kind)
    for step in range(9):
        run.step(step)
    run.optimizer.synchronise()
    return [p.detach() for p in run.params], run.optimizer.state_dict()


def _go_on(rank: int, world_size: int, kind: str, params: list[Tensor], state: dict) -> Tensor:
    run = Run(kind)
    for param, value in zip(run.params, params, strict=True):
        param.data.copy_(value)
    run.optimizer.load_state_dict(state)
    assert not run.optimizer.averages_gradients
    run.step(9)
    if dist.is_initialized():
        # Of the first compressed step alone: all that it did not say.
        scale = run.optimizer.local_state()["worker_error"].abs().max()
        assert scale > 0
    for step in range(10, STEPS):
        run.step(step)
    run.optimizer.synchronise()
    return run.weights()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_another_number_of_ranks_begins_with_errors_of_zero(kind):
    params, state = run_ranks(_save, 2, kind)[0]
    three = run_ranks(_go_on, 3, kind, params, state)
    assert all(torch.equal(weights, three[0]) for weights in three)
    (one,) = run_ranks(_go_on, 1, kind, params, state)
    for weights in (three[0], one):
        assert weights.isfinite().all()
        assert (weights - torch.cat([p.flatten() for p in params])).norm() < 10


def _low_precision(rank: int, world_size: int, kind: str) -> dict[str, Tensor]:
    found = {}
    for name, dtype, masters in (
        ("fp32", torch.float32, False),
        ("master", torch.bfloat16, True),
        ("bf16", torch.bfloat16, False),
    ):
        run = Run(kind, dtype=dtype, master_weights=masters)
        for step in range(STEPS):
            run.step(step)
        run.optimizer.synchronise()
        found[name] = run.weights()
        if masters:
            rounded = [run.optimizer.state[p]["master_param"].bfloat16() for p in run.params]
            found["rounded"] = torch.cat([w.flatten() for w in rounded]).float()
        for param in run.params:
            assert param.dtype == dtype
            assert all(v.dtype == torch.float32 for v in run.optimizer.state[param].values())
    return found


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_bf16_parameters(kind):
    ranks = run_ranks(_low_precision, 2, kind)
    first = ranks[0]
    for found in ranks:
        assert all(torch.equal(found[name], first[name]) for name in first)
    assert torch.equal(first["master"], first["rounded"])
    for name in ("master", "bf16"):  # gradients differ, being those of rounded weights
        assert (first[name] - first["fp32"]).norm() < 0.1 * first["fp32"].norm()


def _refusals(rank: int, world_size: int) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    said = []
    mesh = init_device_mesh("cpu", (world_size,))
    sharded = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    sharded.grad = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    params = [nn.Parameter(torch.ones(size)) for size in (4, 5, 6)]
    own = [nn.Parameter(torch.full((3,), float(rank)))]
    for p in (*params, *own):
        p.grad = torch.ones_like(p)
    shared_out = ZeroRedundancyOptimizer(params, OneBitAdam, freeze_step=1)
    different = OneBitAdam(own, freeze_step=1)
    for optimizer in (OneBitAdam([sharded]), shared_out, different):
        try:
            optimizer.step()
            optimizer.step()
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_sharded_and_different_parameters_are_refused():
    for said in run_ranks(_refusals, 2):
        assert len(said) == 3
        assert said[0].startswith("params: expected whole parameters, since each rank compresses")
        for message in said[1:]:
            assert message.startswith(
                "params: expected the same parameters and values on all ranks"
            )
        assert "ZeroRedundancyOptimizer" in said[1]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (OneBitAdam, {"freeze_step": 0}, "freeze_step: expected an integer of 1 or more, got 0"),
        (OneBitAdam, {"lr": -1.0}, "lr: expected 0 or more"),
        (OneBitLAMB, {"betas": (0.9, 1.0)}, "betas: expected numbers in"),
        (
            OneBitLAMB,
            {"min_coeff": 2.0, "max_coeff": 1.0},
            "min_coeff: expected a number > 0, at m",
        ),
        (OneBitLAMB, {"factor_min": 0.0}, "factor_min: expected a number > 0"),
        (OneBitLAMB, {"coeff_beta": 1.0}, r"coeff_beta: expected a number in \[0, 1\), got 1.0"),
        (ZeroOneAdam, {"var_update_scaler": 0}, "var_update_scaler: expected an integer of 1 or"),
        (
            ZeroOneAdam,
            {"local_step_clipper": 3},
            "local_step_clipper: expected a power of 2, got 3",
        ),
    ],
)
def test_bad_options_are_named(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind([nn.Parameter(torch.ones(2))], **options)


def test_what_fixes_the_buffer():
    run = Run("onebit_adam")
    run.optimizer.load_local_state({"worker_error": torch.zeros(3)})
    run.optimizer.load_local_state({})
    for step in range(FREEZE + 1):
        run.step(step)
    with pytest.raises(RuntimeError, match="add_param_group: expected no compressed step before"):
        run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    run.params[0].grad = torch.eye(7, 3).to_sparse()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        run.optimizer.step()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_of_adamw_begins_a_warm_up(kind):
    run = Run(kind)
    peer = torch.optim.AdamW([{"params": run.params[:DECAYED]}, {"params": run.params[DECAYED:]}])
    for param in run.params:
        param.grad = torch.ones_like(param)
    peer.step()
    run.optimizer.load_state_dict(peer.state_dict())
    assert run.optimizer.updates == 0
    state = run.optimizer.state[run.params[0]]
    assert torch.equal(state["exp_avg"], peer.state[run.params[0]]["exp_avg"])
    for step in range(STEPS):
        run.step(step)
    assert run.weights().isfinite().all()


def test_a_learning_rate_of_zero_moves_nothing():
    run = Run("zero_one_adam", decay=0.0)
    for step in range(FREEZE):
        run.step(step)
    before = run.weights()
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0
    assert not run.optimizer.exchanges
    for _ in range(3):
        run.optimizer.step()
    assert torch.equal(run.weights(), before)
    for step in range(FREEZE + 3, STEPS):
        run.step(step)
    assert run.weights().isfinite().all()
    assert not torch.equal(run.weights(), before)
