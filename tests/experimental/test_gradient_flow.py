"""Sparse averages of a gradient's chunks (GradientFlow) on 2 and 3 ranks, against a simulation."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bert_unpad.experimental import GradientFlow, gradient_flow_hook
from tests.support.processes import run_ranks
from tests.support.seeds import derived
from tests.support.simulated_ranks import Simulated, gradient_flow, loss, net, weights

pytestmark = pytest.mark.slow

CHUNK, MOMENTUM, START, STEPS = 8, 0.9, 2, 12
SHARES = {"half": 0.5, "few": 0.2, "one": 1e-9, "all": 1.0}


class Recording(GradientFlow):
    """Keeps which parameters each bucket of the last pass held, and the bytes it sent."""

    def _sync_bucket(self, bucket):
        if bucket.index() == 0:
            self.layout, self.sent = [], []
        self.layout.append(bucket.parameters())
        all_reduce = dist.all_reduce

        def counting(tensor, *args, **kwargs):
            self.sent.append(tensor.nbytes)
            return all_reduce(tensor, *args, **kwargs)

        dist.all_reduce = counting
        try:
            return super()._sync_bucket(bucket)
        finally:
            dist.all_reduce = all_reduce


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, betas=(MOMENTUM, 0.99))


class Run:
    """One rank's training, from the start or from a state."""

    def __init__(self, rank: int, share: float, saved: dict | None = None) -> None:
        self.rank, self.model = rank, net()
        self.optimizer = _optimizer(self.model)
        if saved is not None:
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
        self.flow = Recording(share, CHUNK, MOMENTUM, START)
        self.replica = DistributedDataParallel(
            self.model, bucket_cap_mb=0.0002, gradient_as_bucket_view=True
        )
        self.replica.register_comm_hook(self.flow, gradient_flow_hook)
        for _ in range(2):
            (self.replica(torch.zeros(1, 7, dtype=torch.float64)) * 0).sum().backward()
            self.model.zero_grad()
        self.flow.restart(0)
        if saved is not None:
            self.flow.restart(saved["step"])
            self.flow.load_state_dict(saved["flow"])

    def steps(self, first: int, last: int) -> dict:
        names = {id(p): name for name, p in self.model.named_parameters()}
        seen, sent, finite = [], [], []
        for step in range(first, last):
            self.model.zero_grad()
            loss(self.replica, self.rank, step).backward()
            self.optimizer.step()
            seen.append(weights(self.model))
            sent.append(self.flow.sent)
            finite.append(bool(self.flow.finite))
        assert all(finite)
        buckets = [[names[id(p)] for p in bucket] for bucket in self.flow.layout]
        sizes = [sum(p.numel() for p in bucket) for bucket in self.flow.layout]
        return {"weights": seen, "sent": sent, "buckets": buckets, "sizes": sizes}

    def saved(self) -> dict:
        return copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "flow": self.flow.state_dict(),
                "step": self.flow.step,
            }
        )


def _train(rank: int, world_size: int) -> dict:
    return {name: Run(rank, share).steps(0, STEPS) for name, share in SHARES.items()}


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request) -> list[dict]:
    return run_ranks(_train, request.param)


def _count(share: float, step: int, chunks: int) -> int:
    """Dense at first, then an exponential fall that takes as long."""
    if step < START:
        return chunks
    return max(1, round(chunks * math.exp(math.log(share) * min(1, (step - START) / START))))


@pytest.mark.parametrize("name", SHARES)
def test_weights_are_those_of_the_simulation(ranks, name):
    found = [rank[name] for rank in ranks]
    expected = gradient_flow(
        Simulated(len(ranks), _optimizer),
        found[0]["buckets"],
        lambda step, chunks: _count(SHARES[name], step, chunks),
        CHUNK,
        MOMENTUM,
        STEPS,
    )
    for step in range(STEPS):
        for rank, want in zip(found, expected[step], strict=True):
            torch.testing.assert_close(rank["weights"][step], want, rtol=1e-9, atol=1e-12)
            assert torch.equal(rank["weights"][step], found[0]["weights"][step])


@pytest.mark.parametrize("name", SHARES)
def test_bytes(ranks, name):
    """Each bucket is one message: the chunks that are sent, and a norm for each chunk."""
    found = ranks[0][name]
    for step, sent in enumerate(found["sent"]):
        want = []
        for size in found["sizes"]:
            chunks = math.ceil(size / CHUNK)
            want.append(8 * (_count(SHARES[name], step, chunks) * CHUNK + chunks))
        assert sent == want, step
    dense, sparse = sum(found["sent"][0]), sum(found["sent"][-1])
    assert sparse < dense / 2 or name in ("half", "all")


def _resume(rank: int, world_size: int) -> list[tuple[dict, dict]]:
    found = []
    for stop in (1, START + 1, 9):
        whole = Run(rank, 0.2)
        whole.steps(0, stop)
        saved = whole.saved()
        found.append((whole.steps(stop, STEPS), Run(rank, 0.2, saved).steps(stop, STEPS)))
    # What is kept of buckets that have changed is dropped.
    saved["flow"]["memory"][0] = torch.ones(1, 3, dtype=torch.float64)
    Run(rank, 0.2, saved).steps(9, STEPS)
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_resumed_run_has_the_same_bits(world_size):
    for rank in run_ranks(_resume, world_size):
        for whole, again in rank:
            for one, other in zip(whole["weights"], again["weights"], strict=True):
                assert torch.equal(one, other)


def _given_gradients(rank: int, world_size: int) -> dict:
    """The momentum of SGD after gradients that do not depend on the weights, and a dense pass."""
    momenta = {}
    for share in (1.0, 0.3):
        weight = nn.Parameter(torch.zeros(33, dtype=torch.float64))
        model = nn.Module()
        model.weight = weight
        model.forward = lambda x, weight=weight: (weight * x).sum()
        replica = DistributedDataParallel(model)
        flow = GradientFlow(share, 4, MOMENTUM)
        replica.register_comm_hook(flow, gradient_flow_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=MOMENTUM)
        draw = torch.Generator().manual_seed(derived(rank))
        for step in range(9):
            if step == 8:
                flow.share = 1.0
            optimizer.zero_grad()
            replica(torch.randn(33, generator=draw, dtype=torch.float64)).backward()
            optimizer.step()
        momenta[share] = optimizer.state[weight]["momentum_buffer"].clone()
    return momenta


def test_late_chunks_count_in_the_momentum_as_if_they_had_been_in_time():
    for momenta in run_ranks(_given_gradients, 2):
        torch.testing.assert_close(momenta[0.3], momenta[1.0], rtol=1e-12, atol=1e-12)


def _nan_in_a_chunk_that_is_not_sent(rank: int, world_size: int) -> tuple[list[bool], list]:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(8))
    model.forward = lambda x: (model.weight * x).sum()
    replica = DistributedDataParallel(model)
    flow = GradientFlow(0.25, 2, 1.0)
    with pytest.raises(RuntimeError, match="no gradient has been averaged yet"):
        _ = flow.finite
    replica.register_comm_hook(flow, gradient_flow_hook)
    finite, gradients = [], []
    for step in range(4):
        x = torch.tensor([9.0, 9.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0])
        if (rank, step) == (1, 1):
            x[2] = math.nan
        model.zero_grad()
        replica(x).backward()
        finite.append(bool(flow.finite))
        flow.forget_unless(flow.finite)
        gradients.append(model.weight.grad.tolist())
    return finite, gradients


def test_a_nan_is_seen_by_all_ranks_before_it_is_sent():
    for finite, gradients in run_ranks(_nan_in_a_chunk_that_is_not_sent, 2):
        assert finite == [True, False, True, True]
        first = [9.0, 9.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
        assert gradients[0] == [9.0, 9.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
        assert gradients[1:] == [first, first, first]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"share": 0}, r"share: expected a number in \(0, 1\], got 0"),
        ({"share": 1.1}, r"share: expected a number in \(0, 1\], got 1.1"),
        ({"share": math.nan}, r"share: expected a number in \(0, 1\], got nan"),
        ({"chunk_size": 0}, "chunk_size: expected a number >= 1, got 0"),
        ({"momentum": 0}, r"momentum: expected a number in \(0, 1\], got 0"),
        ({"start": -1}, "start: expected a number >= 0, got -1"),
    ],
)
def test_numbers_out_of_range(given, message):
    with pytest.raises(ValueError, match=message):
        GradientFlow(**{"share": 0.5, **given})
