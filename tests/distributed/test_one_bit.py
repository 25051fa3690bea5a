"""Averages with one bit a value on gloo: results, errors, what travels."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bert_unpad.distributed import (
    BucketClip,
    OneBitAllreduce,
    OptimizerAllreduce,
    allreduce_hook,
    one_bit,
)
from bert_unpad.optim import OneBitAdam
from tests.support.one_bit_ranks import Signs
from tests.support.processes import run_ranks
from tests.support.seeds import derived

# Nothing; fewer than ranks; one part; parts of which the last is short.
SIZES = [0, 1, 2, 100, 1000, 5003]
ROUNDS = 4


def _buffers(rank: int, size: int, draw: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(derived(10**6 * draw + 31 * size + rank))
    return [torch.randn(size, generator=generator) for _ in range(ROUNDS)]


def _simulated(world_size: int, size: int) -> tuple[int, Signs, list[Tensor]]:
    """The first draw in which rounding could turn no sign, with its averages."""
    for draw in range(1000):
        signs = Signs(world_size, size)
        given = [_buffers(rank, size, draw) for rank in range(world_size)]
        wanted = [signs.average(torch.stack(rows).double()) for rows in zip(*given, strict=True)]
        if signs.nearest > 1e-5:
            return draw, signs, wanted
    raise AssertionError("1000 draws with a value near to 0")


def _averages(rank: int, world_size: int, draws: dict[int, int]) -> dict[int, dict[str, Any]]:
    found = {}
    for size, draw in draws.items():
        allreduce = OneBitAllreduce(size, "cpu")
        guards, results = [], _buffers(rank, size, draw)
        for buffer in results:
            guards.append(allreduce.average_(buffer))
        found[size] = {"guards": guards, "results": results, "bytes": allreduce.bytes_sent}
        found[size] |= allreduce.state_dict()
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_averages_and_errors(world_size):
    simulated = {size: _simulated(world_size, size) for size in SIZES[1:]}
    draws = {0: 0} | {size: draw for size, (draw, *_) in simulated.items()}
    ranks = run_ranks(_averages, world_size, draws)
    for size in SIZES:
        of_ranks = [found[size] for found in ranks]
        _, signs, wanted = simulated.get(size, (0, None, []))
        for number in range(ROUNDS):
            results = [found["results"][number] for found in of_ranks]
            assert all(bool(found["guards"][number].isfinite()) for found in of_ranks)
            assert all(torch.equal(result, results[0]) for result in results)
            if world_size == 1:
                assert torch.equal(results[0], _buffers(0, size, draws[size])[number])
            elif size:
                want = wanted[number]
                torch.testing.assert_close(results[0].double(), want, rtol=1e-5, atol=1e-6)
        if world_size > 1 and size:
            for rank, found in enumerate(of_ranks):
                worker, server = found["worker_error"].double(), found["server_error"].double()
                torch.testing.assert_close(worker, signs.worker[rank], rtol=1e-5, atol=1e-6)
                own = signs.server[rank] if rank < len(signs.server) else torch.zeros(0).double()
                torch.testing.assert_close(server, own, rtol=1e-5, atol=1e-6)


def _with_factors(rank: int, world_size: int, size: int) -> list[bool]:
    """Whether factors do what multiplying by hand does, and errors outlast a change of factors."""
    exponents = torch.arange(size) % 5 - 2
    first, second = torch.exp2(exponents.float()), torch.exp2(-exponents.float())
    plain, factored, seen = OneBitAllreduce(size, "cpu"), OneBitAllreduce(size, "cpu"), []
    factored.use_factors(first)
    for number, buffer in enumerate(_buffers(rank, size, 0)):
        factors = first if number < 2 else second
        if number == 2:
            factored.use_factors(second)
            plain.worker_error *= second / first
            part = factored._own
            plain.server_error *= second[part] / first[part]
        by_hand = buffer * factors
        plain.average_(by_hand)
        factored.average_(buffer)
        seen.append(torch.equal(by_hand / factors, buffer))
        seen.append(
            torch.equal(plain.worker_error / factors, factored.state_dict()["worker_error"])
        )
        again = OneBitAllreduce(size, "cpu")
        again.use_factors(factors)
        again.load_state_dict(factored.state_dict())
        seen.append(torch.equal(again.worker_error, factored.worker_error))
        seen.append(torch.equal(again.server_error, factored.server_error))
    assert plain.bytes_sent == factored.bytes_sent
    return seen


def test_factors_are_those_of_the_values():
    for seen in run_ranks(_with_factors, 2, 1000):
        assert all(seen)


def _bad(rank: int, world_size: int) -> list[tuple[bool, bool]]:
    """Whether each average took place, and whether it changed an error."""
    allreduce, seen = OneBitAllreduce(300, "cpu"), []
    cases = [(None, None), (math.nan, None), (None, 1.0), (math.inf, 0.0), (None, 0.0)]
    for value, found in cases:
        buffer = torch.randn(300)
        if rank == 1 and value is not None:
            buffer[7] = value
        before = [error.clone() for error in allreduce.state_dict().values()]
        flag = None if found is None else torch.tensor([found if rank == 1 else 0.0])
        guard = allreduce.average_(buffer, flag)
        pairs = zip(before, allreduce.state_dict().values(), strict=True)
        seen.append((bool(guard.isfinite()), not all(torch.equal(a, b) for a, b in pairs)))
    return seen


def test_a_buffer_that_is_not_finite_stops_all_ranks():
    for seen in run_ranks(_bad, 2):
        assert seen == [(True, True), (False, False), (False, False), (False, False), (True, True)]


def test_one_rank_stops_alone():
    allreduce, buffer = OneBitAllreduce(3, "cpu"), torch.tensor([1.0, math.inf, 0.0])
    assert not allreduce.average_(buffer).isfinite()
    assert not allreduce.average_(torch.ones(3), torch.ones(())).isfinite()
    assert allreduce.average_(torch.ones(3), torch.zeros(())).isfinite()
    assert (allreduce.state_dict(), allreduce.bytes_sent) == ({}, 0)


def _errors_named(rank: int, world_size: int) -> list[str]:
    allreduce, said = OneBitAllreduce(300, "cpu"), []
    good = allreduce.state_dict()
    calls: list[Callable[[], Any]] = [
        lambda: OneBitAllreduce(-1, "cpu"),
        lambda: allreduce.average_(torch.ones(299)),
        lambda: allreduce.average_(torch.ones(300).half()),
        lambda: allreduce.load_state_dict({}),
        lambda: allreduce.load_state_dict(good | {"server_error": torch.ones(3)}),
    ]
    for call in calls:
        try:
            call()
        except ValueError as error:
            said.append(str(error))
    return said


def test_bad_input_is_named():
    for rank, said in enumerate(run_ranks(_errors_named, 2)):
        own = (256, 44)[rank]
        assert said == [
            "numel: expected 0 or more, got -1",
            "buffer: expected float32 with 300 elements, got torch.float32 with 299",
            "buffer: expected float32 with 300 elements, got torch.float16 with 300",
            "worker_error: expected the shape [300], got none",
            f"server_error: expected the shape [{own}], got [3]",
        ]


@contextmanager
def _counted_bytes() -> Iterator[dict[str, float]]:
    """Bytes that this rank sends, by collective, as a ring sends them."""
    sent: dict[str, float] = {}
    ranks = dist.get_world_size()
    factors = {
        "all_to_all_single": (1, (ranks - 1) / ranks),
        "all_reduce": (0, 2 * (ranks - 1) / ranks),
        "all_gather_single": (1, ranks - 1),
    }
    owners = {"all_gather_single": one_bit}
    before = {name: getattr(owners.get(name, dist), name) for name in factors}

    def counting(name: str) -> Callable[..., Any]:
        place, factor = factors[name]

        def call(*args: Any, **options: Any) -> Any:
            sent[name] = sent.get(name, 0.0) + args[place].nbytes * factor
            return before[name](*args, **options)

        return call

    for name in factors:
        setattr(owners.get(name, dist), name, counting(name))
    try:
        yield sent
    finally:
        for name, function in before.items():
            setattr(owners.get(name, dist), name, function)


FREEZE = 3


def _in_ddp(rank: int, world_size: int, clips: bool) -> dict[str, Any]:
    torch.manual_seed(derived(0))
    model = nn.Sequential(nn.Linear(200, 300), nn.Tanh(), nn.Linear(300, 200))
    numel = sum(p.numel() for p in model.parameters())
    optimizer = OneBitAdam(model.parameters(), lr=2e-3, freeze_step=FREEZE)
    replica = DistributedDataParallel(model, bucket_cap_mb=0.1, gradient_as_bucket_view=True)
    allreduce = OptimizerAllreduce(optimizer)
    if clips:
        clip = BucketClip(5.0)
        clip.attach(replica, allreduce=allreduce)
    else:
        replica.register_comm_hook(allreduce, allreduce_hook)
    draw = torch.Generator().manual_seed(derived(rank))
    counts, losses = [], []
    for _ in range(12):
        x = torch.randn(32, 200, generator=draw)
        with _counted_bytes() as sent:
            loss = (replica(x) - 0.5 * x).square().mean()
            loss.backward()
            before = optimizer.bytes_sent
            optimizer.step()
        optimizer.zero_grad()
        counts.append((dict(sent), optimizer.bytes_sent - before))
        losses.append(float(loss))
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"numel": numel, "counts": counts, "losses": losses, "weights": weights}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("clips", [False, True])
def test_training_sends_a_32nd_of_the_bytes(world_size, clips):
    ranks = run_ranks(_in_ddp, world_size, clips)
    for found in ranks:
        assert torch.equal(found["weights"], ranks[0]["weights"])
        assert found["losses"][-1] < 0.9 * found["losses"][0]
        ring = 2 * (world_size - 1) / world_size * 4 * found["numel"]
        for step, (sent, counted) in enumerate(found["counts"]):
            if step < FREEZE:
                assert sent == {"all_reduce": pytest.approx(ring)}
                assert counted == 0
                continue
            assert "all_reduce" not in sent  # no gradient travels
            if step > FREEZE:  # the first one also compares the ranks' parameters
                assert sum(sent.values()) == counted
            assert counted < ring / 31
            assert sum(sent.values()) <= ring / 20
