"""The state of ShardedOptimizer: saved, loaded, on another number of ranks, without shards."""

import copy

import pytest
import torch

from tests.support.processes import run_ranks
from tests.support.shard_nets import batch, loss_of, net
from tests.support.sharded_training import assert_same_on_all_ranks, plain, sharded, train, weights


def saved(rank: int, world_size: int, kind: str) -> tuple[dict, dict, dict]:
    """The state after some steps, and weights some steps after that."""
    model = net()
    optimizer = sharded(model, kind)
    train(model, optimizer, rank, range(2))
    optimizer.param_groups[0]["lr"] = 5e-3
    middle = copy.deepcopy(weights(model)), optimizer.state_dict()
    for before_first_pass in (True, False):
        again = net(5)
        other = sharded(again, kind)
        if not before_first_pass:
            train(again, other, rank, range(1))
            other.wait()
        again.load_state_dict(middle[0])
        other.load_state_dict(copy.deepcopy(middle[1]))
        assert other.param_groups[0]["lr"] == 5e-3
        train(again, other, rank, range(2, 4))
        if before_first_pass:
            train(model, optimizer, rank, range(2, 4))
        assert all(torch.equal(v, weights(model)[n]) for n, v in weights(again).items())
        assert_same_state(other.state_dict(), optimizer.state_dict())
    assert_same_on_all_ranks(model)
    return *middle, optimizer.state_dict()


def assert_same_state(got: dict, want: dict, exact: bool = True) -> None:
    assert got["state"].keys() == want["state"].keys()
    for number, state in want["state"].items():
        assert got["state"][number].keys() == state.keys()
        for name, value in state.items():
            limit = 0.0 if exact else 1e-5
            torch.testing.assert_close(got["state"][number][name], value, rtol=limit, atol=limit)
    assert got["param_groups"] == want["param_groups"]


@pytest.mark.parametrize("kind", ["adamw", "nadam", "fused", "lamb"])
def test_a_loaded_state_continues_with_the_same_bits(kind):
    states = run_ranks(saved, 3, kind)
    for _, middle, _ in states[1:]:
        assert_same_state(middle, states[0][1])
    # Whole tensors, which the optimizer without shards takes; what only has to be alike is alike.
    weight, middle, end = states[0]
    model = net(1)
    model.load_state_dict(weight)
    alone = plain(model, kind)
    alone.load_state_dict(middle)
    shapes = [p.shape for group in alone.param_groups for p in group["params"]]
    assert [alone.state[p]["exp_avg"].shape for g in alone.param_groups for p in g["params"]] == (
        shapes
    )
    for step in (2, 3):
        model.zero_grad()
        for rank in range(3):
            ids = batch(rank, step)
            (loss_of(model(ids), ids) / 3).backward()
        alone.step()
    assert_same_state(alone.state_dict(), end, exact=False)


def continued(rank: int, world_size: int, start: tuple[dict, dict], kind: str) -> dict:
    model = net(rank)
    model.load_state_dict(start[0])
    optimizer = sharded(model, kind)
    optimizer.load_state_dict(start[1])
    ids = torch.cat([batch(r, 9) for r in range(3)])
    loss_of(model(ids), ids).backward()  # the same batch on every rank
    optimizer.step()
    return optimizer.state_dict()


def test_states_fit_another_number_of_ranks():
    start = run_ranks(saved, 3, "fused")[0][:2]
    two, three = (run_ranks(continued, ranks, start, "fused")[0] for ranks in (2, 3))
    assert_same_state(two, three, exact=False)
