"""MTDAO: its steps against a simulation of all ranks, one rank against AdamW, resuming, bytes."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bert_unpad.experimental import MTDAO
from tests.support.processes import run_ranks
from tests.support.seeds import derived
from tests.support.simulated_ranks import loss, mt_dao, net, weights

STEPS = 14
CASES = {
    "defaults": {"period": 4},
    "every step": {"period": 1, "start": 2},
    "two momenta": {"period": 3, "fast_beta": 0.8, "slow_weight": 0.6, "start": 3},
    "periods": {"period": 2, "momentum_period": 3, "variance_period": 5, "start": 1},
    "momentum alone": {"period": 4, "slow_weight": 1.0, "betas": (0.9, 0.95)},
    "gradient alone": {"period": 4, "slow_weight": 0.0},
}


class Run:
    """One rank's training, from the start or from a state."""

    def __init__(self, rank: int, options: dict, saved: dict | None = None) -> None:
        self.rank, self.model = rank, net()
        self.optimizer = MTDAO(self.model.parameters(), lr=0.02, weight_decay=0.1, **options)
        self.sent: list[list[int]] = []
        if saved is not None:
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])

    def steps(self, first: int, last: int) -> list[torch.Tensor]:
        seen, all_reduce = [], dist.all_reduce

        def counting(tensor, *args, **kwargs):
            self.sent[-1].append(tensor.nbytes)
            return all_reduce(tensor, *args, **kwargs)

        for step in range(first, last):
            self.model.zero_grad()
            loss(self.model, self.rank, step).backward()
            if self.optimizer.averages_gradients:
                for parameter in self.model.parameters():
                    all_reduce(parameter.grad)
                    parameter.grad /= dist.get_world_size()
            self.sent.append([])
            dist.all_reduce = counting
            try:
                self.optimizer.step()
            finally:
                dist.all_reduce = all_reduce
            seen.append(weights(self.model))
        return seen

    def saved(self) -> dict:
        return copy.deepcopy(
            {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        )


def _train(rank: int, world_size: int) -> dict:
    runs = {name: Run(rank, options) for name, options in CASES.items()}
    return {name: (run.steps(0, STEPS), run.sent) for name, run in runs.items()}


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request) -> list[dict]:
    return run_ranks(_train, request.param)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_the_simulation(ranks, name):
    given = {"betas": (0.999, 0.999), "slow_weight": 0.9, "fast_beta": 0.0, "start": 0}
    given |= CASES[name]
    period = given.pop("period")
    periods = (period, *(given.pop(f"{x}_period", period) for x in ("momentum", "variance")))
    expected = mt_dao(
        len(ranks), STEPS, lr=0.02, eps=1e-8, weight_decay=0.1, periods=periods, **given
    )
    found = [rank[name][0] for rank in ranks]
    for step in range(STEPS):
        for rank, want in zip(found, expected[step], strict=True):
            torch.testing.assert_close(rank[step], want, rtol=1e-8, atol=1e-10)
        done = step + 1 - given["start"]
        same = torch.equal(found[0][step], found[1][step])
        assert same == (done <= 0 or done % period == 0), step


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_bytes(ranks, name):
    """Each kind of tensor is one message, when it is due and at no other time."""
    options = CASES[name]
    period = options["period"]
    momenta = 2 if "fast_beta" in options else 1
    kinds = [period, *[options.get("momentum_period", period)] * momenta]
    kinds.append(options.get("variance_period", period))
    size = 8 * len(weights(net()))
    for step, sent in enumerate(ranks[0][name][1]):
        done = step + 1 - options.get("start", 0)
        assert sent == [size for kind in kinds if done > 0 and done % kind == 0], step


def _resume(rank: int, world_size: int) -> list[tuple[list, list]]:
    found = []
    for name in ("two momenta", "periods"):
        for stop in (1, 5, 6):
            whole = Run(rank, CASES[name])
            whole.steps(0, stop)
            again = Run(rank, CASES[name], whole.saved())
            assert again.optimizer.steps == stop
            found.append((whole.steps(stop, STEPS), again.steps(stop, STEPS)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_resumed_run_has_the_same_bits(world_size):
    for rank in run_ranks(_resume, world_size):
        for whole, again in rank:
            for one, other in zip(whole, again, strict=True):
                assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_rank_with_the_momentum_alone_is_adamw(dtype):
    draw = torch.Generator().manual_seed(derived(1))
    sizes = [(5, 3), (7,), (1,), (0,)]
    ours = [nn.Parameter(torch.randn(size, generator=draw).to(dtype)) for size in sizes]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    options = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    optimizers = MTDAO(ours, **options, slow_weight=1.0), torch.optim.AdamW(theirs, **options)
    for step in range(20):
        for one, other in zip(ours, theirs, strict=True):
            other.grad = torch.randn(one.shape, generator=draw).to(dtype)
            one.grad = None if step == 4 and one.numel() == 7 else other.grad.clone()
            other.grad = one.grad
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_a_closure_and_a_sparse_gradient():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = MTDAO([parameter], lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = parameter.square().sum()
        value.backward()
        return value

    assert optimizer.step(closure) == 3
    assert optimizer.steps == 1
    assert (parameter < 1).all()
    parameter.grad = torch.ones(3).to_sparse()
    with pytest.raises(RuntimeError, match="MTDAO does not support sparse gradients"):
        optimizer.step()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lr": -1}, "lr: expected a number of 0 or more, got -1"),
        ({"eps": -1}, "eps: expected a number of 0 or more, got -1"),
        ({"weight_decay": float("nan")}, "weight_decay: expected a number of 0 or more, got nan"),
        ({"betas": (0.9, 1)}, r"betas: expected two numbers in \[0, 1\), got \(0.9, 1\)"),
        ({"betas": (0.9,)}, r"betas: expected two numbers in \[0, 1\), got \(0.9,\)"),
        ({"slow_weight": 1.1}, r"slow_weight: expected a number in \[0, 1\], got 1.1"),
        ({"fast_beta": 1}, r"fast_beta: expected a number in \[0, 1\), got 1"),
        ({"period": 0}, "period: expected an integer of 1 or more, got 0"),
        ({"period": 1.5}, "period: expected an integer of 1 or more, got 1.5"),
        ({"momentum_period": 0}, "momentum_period: expected an integer of 1 or more, got 0"),
        ({"variance_period": -2}, "variance_period: expected an integer of 1 or more, got -2"),
        ({"start": -1}, "start: expected an integer of 0 or more, got -1"),
        ({"start": 0.5}, "start: expected an integer of 0 or more, got 0.5"),
    ],
)
def test_numbers_out_of_range(given, message):
    with pytest.raises(ValueError, match=message):
        MTDAO([nn.Parameter(torch.zeros(2))], **given)
