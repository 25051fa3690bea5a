"""Layer-wise averages of the model (DreamDDP) on 2 and 3 ranks, against a simulation in float64."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bert_unpad.experimental.dream_ddp import PROFILED, PartialSync, partial_sync_hook
from tests.support.processes import run_ranks
from tests.support.simulated_ranks import Simulated, loss, net, partial_sync, weights

pytestmark = pytest.mark.slow

PERIOD, START, STEPS = 3, 2, 16


class Recorder:
    """Calls the hook, and writes down in which order things happen."""

    def __init__(self, model: nn.Module, sync: PartialSync) -> None:
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.sync = sync
        self.buckets: list[list[str]] = []
        self.events: list[tuple[str, int]] = []
        self._all_reduce = dist.all_reduce

    def __enter__(self) -> Recorder:
        def all_reduce(tensor, *args, **kwargs):
            self.events.append(("sent", tensor.nbytes))
            return self._all_reduce(tensor, *args, **kwargs)

        dist.all_reduce = all_reduce
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_reduce = self._all_reduce


def _hook(recorder: Recorder, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    if bucket.index() == 0:
        recorder.buckets = []
    recorder.buckets.append([recorder.names[id(p)] for p in bucket.parameters()])
    recorder.events.append(("ready", bucket.index()))
    return partial_sync_hook(recorder.sync, bucket)


_hook.__annotations__ = dict(partial_sync_hook.__annotations__ | {"bucket": dist.GradBucket})


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


class Run:
    """One rank's training, from the start or from a state."""

    def __init__(self, rank: int, saved: dict | None = None) -> None:
        self.rank, self.model = rank, net()
        self.optimizer = _optimizer(self.model)
        if saved is not None:
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
        self.sync = PartialSync(PERIOD, START)
        self.recorder = Recorder(self.model, self.sync)
        # DDP gives all ranks the weights of rank 0; here they may differ already.
        own = [p.detach().clone() for p in self.model.parameters()]
        self.replica = DistributedDataParallel(
            self.model, bucket_cap_mb=0.0002, gradient_as_bucket_view=True
        )
        torch._foreach_copy_([p.data for p in self.model.parameters()], own)
        self.replica.register_comm_hook(self.recorder, _hook)
        for _ in range(2):
            (self.replica(torch.zeros(1, 7, dtype=torch.float64)) * 0).sum().backward()
            self.model.zero_grad()
        if saved is not None:
            self.sync.step = saved["step"]
            self.sync.load_state_dict(saved["sync"])

    def steps(self, first: int, last: int) -> dict:
        seen, events = [], []
        with self.recorder:
            for step in range(first, last):
                self.recorder.events = []
                self.model.zero_grad()
                loss(self.replica, self.rank, step).backward()
                self.sync.finish()
                self.optimizer.step()
                seen.append(weights(self.model))
                events.append(self.recorder.events)
        return {
            "weights": seen,
            "events": events,
            "buckets": self.recorder.buckets,
            "schedule": self.sync.schedule,
        }

    def saved(self) -> dict:
        return copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "sync": self.sync.state_dict(),
                "step": self.sync.step,
            }
        )


# Seconds by bucket, four of them: backward passes, then exchanges. The schedules are given below.
PROFILES = {
    "slow link": ([0.0, 1.0, 1.0, 1.0], [9.0, 9.0, 9.0, 9.0]),
    "bubbles": ([0.0, 2.0, 1.0, 1.0], [2.0, 1.0, 3.0, 1.0]),
    "fast link": ([0.0, 2.0, 2.0, 2.0], [1.0, 1.0, 1.0, 0.0]),
}


def _train(rank: int, world_size: int) -> dict:
    found = {"measured": Run(rank).steps(0, STEPS)}
    for name, profile in PROFILES.items():
        run = Run(rank)
        state = run.sync.state_dict() | {"profile": torch.tensor(profile)}
        run.sync.load_state_dict(state)
        found[name] = run.steps(0, STEPS)
        found[name]["sizes"] = state["sizes"]
    return found


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request) -> list[dict]:
    return run_ranks(_train, request.param)


def _check(ranks: list[dict], name: str, averaged: int) -> None:
    found = [rank[name] for rank in ranks]
    assert all(rank["schedule"] == found[0]["schedule"] for rank in found)
    assert all(rank["buckets"] == found[0]["buckets"] for rank in found)
    expected = partial_sync(
        Simulated(len(ranks), _optimizer),
        found[0]["buckets"],
        found[0]["schedule"],
        averaged,
        STEPS,
    )
    for step in range(STEPS):
        for rank, want in zip(found, expected[step], strict=True):
            torch.testing.assert_close(rank["weights"][step], want, rtol=1e-9, atol=1e-12)
        same = torch.equal(found[0]["weights"][step], found[1]["weights"][step])
        assert same == (step < averaged), step


def test_schedule_from_measured_times(ranks):
    _check(ranks, "measured", START + PROFILED)
    schedule = ranks[0]["measured"]["schedule"]
    assert len(schedule) == PERIOD
    assert {bucket for due in schedule for bucket in due} == {0, 1, 2, 3}


@pytest.mark.parametrize("name", PROFILES)
def test_given_schedules(ranks, name):
    _check(ranks, name, START)
    schedules = {
        "slow link": [[0], [1], [2, 3]],
        "bubbles": [[0, 1, 2], [0, 1, 3], [0, 1]],
        "fast link": [[0, 1, 2, 3]] * 3,
    }
    assert ranks[0][name]["schedule"] == schedules[name]


@pytest.mark.parametrize("name", PROFILES)
def test_bytes_and_their_moment(ranks, name):
    """What is due is sent, nothing else, and each bucket as soon as it is ready."""
    found = ranks[0][name]
    sizes = [8 * size for size in found["sizes"]]
    for step, events in enumerate(found["events"]):
        due = range(4) if step < START else found["schedule"][step % PERIOD]
        want = []
        for bucket in range(4):
            want.append(("ready", bucket))
            if bucket in due:
                want.append(("sent", sizes[bucket]))
        assert events == want, step


def test_bytes_of_timed_steps(ranks):
    sizes = [8 * size for size in ranks[0]["bubbles"]["sizes"]]
    for step, events in enumerate(ranks[0]["measured"]["events"][: START + PROFILED]):
        sent = [size for kind, size in events if kind == "sent"]
        if step < START:
            assert sent == sizes
        elif step < START + PROFILED - 1:  # the meeting of the ranks, then the bucket
            assert sent == [size for bucket in sizes for size in (8, bucket)]
        else:  # and the times, of four buckets
            assert sent == [*(size for bucket in sizes for size in (8, bucket)), 2 * 4 * 8]


def _resume(rank: int, world_size: int) -> dict:
    found = {}
    for stop in (1, START + 2, START + PROFILED, 12):
        whole = Run(rank)
        before = whole.steps(0, stop)
        saved = whole.saved()
        if stop < START + PROFILED:
            # The rest of the times is measured again, so only what they have in common is compared.
            found[stop] = (whole.steps(stop, START + PROFILED), None)
            again = Run(rank, saved)
            found[stop] = (found[stop][0], again.steps(stop, START + PROFILED))
            assert len(again.sync.schedule) == PERIOD
        else:
            found[stop] = (whole.steps(stop, STEPS), Run(rank, saved).steps(stop, STEPS))
            assert before["schedule"] == found[stop][1]["schedule"]
    other = Run(rank)
    state = other.sync.state_dict()
    other.sync.load_state_dict(
        state | {"sizes": [1, 2], "profile": torch.ones(2, 2, dtype=torch.float64)}
    )
    assert other.sync.schedule is None
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_resumed_run_has_the_same_schedule_and_bits(world_size):
    for rank in run_ranks(_resume, world_size):
        for whole, again in rank.values():
            for one, other in zip(whole["weights"], again["weights"], strict=True):
                assert torch.equal(one, other)


def _without_settling(rank: int, world_size: int) -> int:
    """DDP forms other buckets after its first pass, which is timed already."""
    model = net()
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-5)
    sync = PartialSync(PERIOD)
    ddp.register_comm_hook(sync, partial_sync_hook)
    optimizer = _optimizer(model)
    for step in range(PROFILED + PERIOD + 2):
        optimizer.zero_grad()
        loss(ddp, rank, step).backward()
        sync.finish()
        optimizer.step()
    return sum(map(len, sync.schedule))


def test_a_first_pass_of_other_buckets_does_not_count():
    assert min(run_ranks(_without_settling, 2)) > 2


def test_numbers_out_of_range():
    with pytest.raises(ValueError, match="period: expected a number >= 2, got 1"):
        PartialSync(1)
    with pytest.raises(ValueError, match="start: expected a number >= 0, got -1"):
        PartialSync(4, -1)
