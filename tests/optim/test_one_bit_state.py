"""State, precision and options of 1-bit Adam, 1-bit LAMB and 0/1 Adam; what they refuse."""

import io

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from bert_unpad.experimental import ZeroOneAdam
from bert_unpad.optim import OneBitAdam, OneBitLAMB
from tests.support.one_bit_ranks import DECAYED, gradient, lr_of
from tests.support.one_bit_runs import FREEZE, OPTIMIZERS, STEPS, Run
from tests.support.processes import run_ranks
from tests.support.seeds import derived


def _resume(rank: int, world_size: int, kind: str, at: int, scale: str) -> bool:
    whole, first = Run(kind, scale=scale), Run(kind, scale=scale)
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
    second = Run(kind, scale=scale)
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


def _resumes(rank: int, world_size: int) -> dict[tuple[str, int, str], bool]:
    # Before and at the end of the warm-up, in the middle, and within an interval of 0/1 Adam.
    places = [(at, "buffer") for at in (3, 5, 9, 14)] + [(at, "row") for at in (3, 9, 14)]
    return {
        (kind, at, scale): _resume(rank, world_size, kind, at, scale)
        for kind in OPTIMIZERS
        for at, scale in places
    }


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
        for param in run.params:
            param.data.copy_(param.bfloat16())
        for step in range(STEPS):
            # Those of no weights, and such that bf16 holds them and their mean exactly.
            draw = torch.Generator().manual_seed(derived(100 * rank + step))
            grads = [torch.randint(-31, 32, p.shape, generator=draw) / 8 for p in run.params]
            run.step(step, grads=[grad.to(dtype) for grad in grads])
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
    assert torch.equal(first["master"], first["fp32"].bfloat16().float())
    # Each step rounds to 8 bits. Where 0/1 Adam's sum of own steps, which it takes from weights, is
    # next to zero, that may turn the sign that is sent: for few of them.
    errors = (first["bf16"] - first["fp32"]).abs().sort().values
    few = len(errors) // 10 if kind == "zero_one_adam" else 0
    assert errors[: len(errors) - few].norm() < STEPS * 2**-8 * first["fp32"].norm()


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
        (OneBitAdam, {"freeze_step": True}, "freeze_step: expected an integer of 1 or more, got T"),
        (OneBitAdam, {"scale": "column"}, "scale: expected one of buffer, tensor, row, element, g"),
        (OneBitAdam, {"lr": -1.0}, "lr: expected a number of 0 or more"),
        (OneBitLAMB, {"betas": (0.9, 1.0)}, "betas: expected two numbers in"),
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
def test_a_loss_scale_changes_nothing(kind):
    """A power of 2, so the bits are the same."""
    results = []
    for scale in (1.0, 1024.0):
        run = Run(kind)
        for step in range(STEPS):
            run.optimizer.grad_scale = torch.tensor(scale)
            for group in run.optimizer.param_groups:
                group["lr"] = lr_of(step)
            weights = [p.detach() for p in run.params]
            for param, grad in zip(run.params, gradient(weights, 0, step), strict=True):
                param.grad = grad * scale
            run.optimizer.step()
        results.append(run.everything())
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def _without_gradients(rank: int, world_size: int) -> Tensor:
    run = Run("onebit_adam")
    for step in range(STEPS):
        for param, grad in zip(run.params, gradient(list(run.params), rank, step), strict=True):
            param.grad = grad.detach()
            if run.optimizer.averages_gradients:
                dist.all_reduce(param.grad)
        if step > FREEZE and rank == 1:
            run.params[0].grad = None
        run.optimizer.step()
    return run.weights()


def test_no_gradient_counts_as_zero():
    one, other = run_ranks(_without_gradients, 2)
    assert torch.equal(one, other)
    assert one.isfinite().all()


def test_a_closure_is_called_with_gradients():
    run, losses = Run("onebit_adam", freeze=2), []

    def closure() -> Tensor:
        run.optimizer.zero_grad()
        loss = sum((p - 1).square().sum() for p in run.params)
        loss.backward()
        losses.append(float(loss.detach()))
        return loss

    for _ in range(30):
        loss = run.optimizer.step(closure)
    assert float(loss.detach()) == losses[-1] < losses[0]


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
