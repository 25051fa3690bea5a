"""One-bit optimizers where a parameter, a group, a rank or the order of calls is not as usual."""

import pytest
import torch
from torch import Tensor, nn

from bert_unpad.experimental import ZeroOneAdam
from bert_unpad.optim import OneBitAdam, OneBitLAMB
from tests.support.one_bit_runs import FREEZE, OPTIMIZERS, Run
from tests.support.processes import run_ranks
from tests.support.seeds import derived


@pytest.mark.parametrize("kind", [OneBitAdam, OneBitLAMB, ZeroOneAdam])
@pytest.mark.parametrize("missed", [4, 2])
def test_parameters_without_gradients_in_the_warm_up_leave_others_alone(kind, missed):
    """They are of one size, so they share a call of the operator if anything does."""
    found = []
    for count in (1, 2):
        torch.manual_seed(derived(1))
        params = [nn.Parameter(torch.randn(8)) for _ in range(2)][-count:]
        optimizer = kind(params, lr=0.1, freeze_step=4)
        for step in range(8):
            draw = torch.Generator().manual_seed(derived(step))
            params[-1].grad = torch.randn(8, generator=draw)
            if count == 2:
                params[0].grad = torch.ones(8) if step >= missed else None
            optimizer.step()
        found.append(params)
    (alone,), (late, beside) = found
    assert late.isfinite().all()
    if kind is not OneBitLAMB:  # whose scales depend on all parameters
        assert torch.equal(alone, beside)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_groups_loaded_between_compressed_steps_count(kind):
    run = Run(kind)
    for step in range(FREEZE + 3):
        run.step(step)
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    before = run.weights()
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0
    run.optimizer.step()
    assert torch.equal(run.weights(), before)


def test_a_group_that_stands_still_keeps_its_momentum():
    params = [nn.Parameter(torch.ones(6)) for _ in range(2)]
    groups = [{"params": [params[0]], "lr": 0.0}, {"params": [params[1]], "lr": 0.1}]
    optimizer = ZeroOneAdam(groups, freeze_step=2)
    for _ in range(4):
        for param in params:
            param.grad = torch.ones(6)
        optimizer.step()
    assert (optimizer.state[params[0]]["exp_avg"] > 0).all()
    assert torch.equal(params[0], torch.ones(6))


def _overflow(rank: int, world_size: int) -> Tensor:
    run = Run("zero_one_adam")
    for step in range(16):  # ends with an exchange, so that the ranks cannot differ
        # Only rank 0 leaves a local step out, as with a GradScaler, which asks no other rank.
        run.optimizer.found_inf = torch.tensor(float((rank, step) == (0, 12)))
        run.step(step)
    run.optimizer.synchronise()
    return run.weights()


def test_a_step_that_one_rank_leaves_out_keeps_weights_the_same():
    one, other = run_ranks(_overflow, 2)
    assert one.isfinite().all()
    assert torch.equal(one, other)


def test_a_negative_clipper_is_refused():
    with pytest.raises(ValueError, match="local_step_clipper: expected a power of 2, got -4"):
        ZeroOneAdam([nn.Parameter(torch.ones(2))], local_step_clipper=-4)


def _after_one_exchange(rank: int, world_size: int, shapes: list, sizes: list) -> dict[str, float]:
    """How much of the momenta is lost by one exchange, by `scale`; gradients are of `sizes`."""
    found = {}
    for scale in ("buffer", "tensor", "row", "element"):
        draw = torch.Generator().manual_seed(derived(3))
        params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        signs = [torch.randint(0, 2, shape, generator=draw) * 2.0 - 1.0 for shape in shapes]
        optimizer = OneBitAdam(params, freeze_step=4, scale=scale)
        for _ in range(5):
            for param, sign, size in zip(params, signs, sizes, strict=True):
                param.grad = sign * size
            optimizer.step()
        lost, whole = 0.0, 0.0
        for param in params:
            momentum = param.grad * (1 - 0.9**5)
            lost += (optimizer.state[param]["exp_avg"] - momentum).square().sum()
            whole += momentum.square().sum()
        found[scale] = float(lost / whole)
    return found


@pytest.mark.parametrize(
    ("sizes", "exact"),
    [
        ([torch.tensor(1.0), torch.tensor(0.25)], ["tensor", "row", "element"]),
        ([torch.tensor([[1.0], [0.25], [0.125]]), torch.tensor(0.5)], ["row", "element"]),
        ([torch.tensor([1.0, 0.5, 0.125, 0.25]), torch.tensor(0.5)], ["element"]),
    ],
)
def test_values_that_share_a_size_and_a_scale_lose_nothing(sizes, exact):
    for lost in run_ranks(_after_one_exchange, 2, [(3, 4), (5,)], sizes):
        assert all((lost[scale] < 1e-9) == (scale in exact) for scale in lost), lost


def _without_gradients(rank: int, world_size: int) -> Tensor:
    param = nn.Parameter(torch.ones(8))
    optimizer = OneBitAdam([param], freeze_step=1, scale="row", weight_decay=0.0)
    for _ in range(3):
        param.grad = torch.zeros(8)
        optimizer.step()
    return param.detach()


def test_a_variance_of_zero_everywhere_has_factors_too():
    for weights in run_ranks(_without_gradients, 2):
        assert torch.equal(weights, torch.ones(8))
