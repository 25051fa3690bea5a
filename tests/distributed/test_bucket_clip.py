"""Clipping before the average, on 1 to 3 ranks, against the formulas in float64.

Every rank computes its gradient once more without DDP, clips it as the policy says, and averages
that over the ranks: what DDP with the hook leaves in `.grad` has to be the same.
"""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bert_unpad.distributed import POLICIES, BucketClip, ClipBefore
from bert_unpad.distributed.bucket_shares import BucketShares
from tests.support.processes import run_ranks
from tests.support.seeds import derived

C = 0.5
STEPS = 4


class Net(nn.Module):
    """Several buckets of unlike sizes; a layer that nobody uses in odd steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(40, 40), nn.Linear(40, 40), nn.Linear(40, 40)])
        self.spare = nn.Linear(40, 40)
        self.head = nn.Linear(40, 3)

    def forward(self, x: Tensor, spare: bool = True) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(self.spare(x) if spare else x)


class Recording(BucketClip):
    """Keeps which parameters each bucket of the last pass held."""

    def sync(self, bucket):
        if bucket.index() == 0:
            self.layout = []
        self.layout.append(bucket.parameters())
        return super().sync(bucket)


def _net() -> Net:
    torch.manual_seed(derived(5))
    return Net()


def _batch(rank: int, step: int, part: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(derived(1000 * rank + 10 * step + part))
    return torch.randn(8, 40, generator=generator) * (1 + 3 * rank + step)


def _local(model: nn.Module, batches: list[Tensor], spare: bool) -> dict[str, Tensor]:
    """This rank's gradient, without DDP."""
    bare = copy.deepcopy(model)
    bare.zero_grad()
    for x in batches:
        bare(x, spare).square().sum().backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in bare.named_parameters()
    }


def _shares(policy: str, sizes: list[int], before: list[float]) -> list[float]:
    if policy == "equal":
        return [1 / len(sizes)] * len(sizes)
    by_size = [n / sum(sizes) for n in sizes]
    if policy == "numel":
        return by_size
    total = sum(x * x for x in before)
    return [0.99 * x * x / total + 0.01 * s for x, s in zip(before, by_size, strict=True)]


def _check_training(
    rank: int,
    world_size: int,
    policy: str,
    *,
    parts: int = 1,
    wire: torch.dtype | None = None,
    max_norm: float = C,
    spare: bool = True,
    **ddp: object,
) -> int:
    """Some steps against the formulas; returns how many buckets were clipped."""
    model = _net()
    clip = Recording(max_norm, policy, wire)
    replica = DistributedDataParallel(model, bucket_cap_mb=0.004, **ddp)
    clip.attach(replica)
    names = {id(p): name for name, p in model.named_parameters()}
    layout, norms, clipped = None, [], 0
    for step in range(STEPS):
        used = spare or step % 2 == 0
        batches = [_batch(rank, step, part) for part in range(parts)]
        local = _local(model, batches, used)
        for x in batches[:-1]:
            with replica.no_sync():
                replica(x, used).square().sum().backward()
        replica(batches[-1], used).square().sum().backward()
        report = clip.report()
        buckets = [[names[id(p)] for p in bucket] for bucket in clip.layout]
        assert sorted(name for bucket in buckets for name in bucket) == sorted(local)
        sizes = [sum(local[name].numel() for name in bucket) for bucket in buckets]
        flat = [torch.cat([local[n].double().flatten() for n in bucket]) for bucket in buckets]
        torch.testing.assert_close(
            report.norms.double(), torch.stack([g.norm() for g in flat]), rtol=1e-5, atol=1e-9
        )
        assert float(report.bounds.square().sum()) == pytest.approx(max_norm**2, rel=1e-5)
        if buckets == layout:  # else the bounds go by size, see test_shares
            expected = [max_norm * math.sqrt(s) for s in _shares(policy, sizes, norms)]
            assert report.bounds.tolist() == pytest.approx(expected, rel=1e-5)
        layout, norms = buckets, [float(g.norm()) for g in flat]
        clipped += int(report.clipped)
        for g, bound in zip(flat, report.bounds.tolist(), strict=True):
            g *= min(1.0, bound / max(float(g.norm()), 1e-30)) / world_size
            if world_size > 1:
                dist.all_reduce(g)
        _compare(model, buckets, flat, wire)
        assert torch.cat(flat).norm() <= max_norm * 1.0001
        assert bool(report.finite)
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 0.01 * p.grad
        replica.zero_grad()
    assert len(layout) > 2  # DDP's first pass has one
    return clipped


def _compare(
    model: nn.Module, buckets: list[list[str]], flat: list[Tensor], wire: torch.dtype | None
) -> None:
    scale = torch.cat(flat).abs().max()
    for bucket, exact in zip(buckets, flat, strict=True):
        parameters = [model.get_parameter(name) for name in bucket]
        got = torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters]
        )
        error = (got.double() - exact).abs().max() / scale
        assert error < (1e-5 if wire is None else 2 * torch.finfo(wire).eps), (bucket, error)


def _variants(rank: int, world_size: int) -> None:
    if world_size == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for policy in POLICIES:
        assert _check_training(rank, world_size, policy) > 0
    check = _check_training
    assert check(rank, world_size, "equal", max_norm=1e9) == 0
    for wire in (torch.bfloat16, torch.float16):
        check(rank, world_size, "adaptive", wire=wire)
    check(rank, world_size, "equal", parts=3)
    check(rank, world_size, "adaptive", parts=2, gradient_as_bucket_view=True)
    check(rank, world_size, "numel", static_graph=True)
    check(rank, world_size, "adaptive", spare=False, find_unused_parameters=True)
    check(rank, world_size, "equal", spare=False, find_unused_parameters=True, parts=2)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_are_clipped_then_averaged(world_size):
    run_ranks(_variants, world_size)


def _mixed(rank: int, world_size: int) -> None:
    """Layers in bfloat16 beside layers in float32: buckets of their own."""
    torch.manual_seed(derived(5))
    first, second = nn.Linear(20, 20), nn.Linear(20, 20).bfloat16()

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = first, second

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).bfloat16()).float()

    model = Mixed()
    clip = BucketClip(C, "numel", torch.bfloat16, error_feedback=True)
    replica = DistributedDataParallel(model)
    clip.attach(replica)
    for step in range(3):
        replica(_batch(rank, step)[:, :20]).square().sum().backward()
        report = clip.report()
        assert len(report.norms) == 2
        assert int(report.clipped) == 2
        grads = [p.grad.double().flatten() for p in model.parameters()]
        assert float(torch.cat(grads).norm()) <= C * 1.01
        assert [p.grad.dtype for p in model.parameters()] == [torch.float32] * 2 + [
            torch.bfloat16
        ] * 2
        replica.zero_grad()


def test_buckets_of_different_dtypes():
    run_ranks(_mixed, 2)


def _poisoned(rank: int, world_size: int) -> dict[str, list[float]]:
    """Norms of the averaged gradient where rank 1's is a million times too large; and what the
    step after an infinity looks like."""
    norms = {}
    for policy in POLICIES:
        model = _net()
        clip = BucketClip(C, policy)
        replica = DistributedDataParallel(model, bucket_cap_mb=0.004)
        clip.attach(replica)
        norms[policy] = []
        for step in range(5):
            loss = replica(_batch(rank, step)).square().sum()
            if rank == 1 and step == 2:
                loss = loss * 1e6
            handle = None
            if rank == 1 and step == 3:
                handle = model.head.weight.register_hook(lambda g: g * math.inf)
            loss.backward()
            if handle is not None:
                handle.remove()
            grads = torch.cat([p.grad.flatten() for p in model.parameters()])
            report = clip.report()
            assert bool(report.finite) == (step != 3)
            assert bool(grads.isfinite().all()) == (step != 3)
            if step == 3:  # the other buckets arrive as if nothing had happened
                assert 0 < int(grads.isnan().sum()) < grads.numel()
            norms[policy].append(float(grads.norm()))
            replica.zero_grad()
    return norms


def test_one_rank_cannot_break_the_bound():
    for norms in run_ranks(_poisoned, 2):
        for policy in POLICIES:
            finite = [x for x in norms[policy] if math.isfinite(x)]
            assert len(finite) == 4
            assert all(0 < x <= C * 1.0001 for x in finite)


def _before(rank: int, world_size: int) -> None:
    for wire in (None, torch.bfloat16):
        model = _net()
        clip = ClipBefore(model.parameters(), C, wire)
        for step in range(2):
            local = _local(model, [_batch(rank, step)], spare=step == 0)
            model(_batch(rank, step), step == 0).square().sum().backward()
            report = clip.sync()
            flat = torch.cat([g.double().flatten() for g in local.values()])
            assert float(report.norm) == pytest.approx(float(flat.norm()), rel=1e-5)
            norm = float(flat.norm())
            assert int(report.clipped) == (norm > C)  # for nearly all seeds
            flat *= min(C / norm, 1.0) / world_size
            dist.all_reduce(flat)
            _compare(model, [list(local)], [flat], wire)
            model.zero_grad()
    model(_batch(rank, 0)).square().sum().backward()
    if rank == 0:
        model.head.bias.grad[1] = math.nan
    assert not bool(clip.sync().finite)
    assert all(p.grad.isnan().all() for p in model.parameters())


def test_clip_before():
    run_ranks(_before, 2)


def _error_feedback(rank: int, world_size: int) -> tuple[float, float]:
    """How far sums of 200 averaged gradients are off, with and without feedback."""
    errors = []
    for feedback in (False, True):
        model = _net()
        clip = BucketClip(math.inf, "equal", torch.bfloat16, feedback)
        replica = DistributedDataParallel(model, bucket_cap_mb=0.004)
        clip.attach(replica)
        local = _local(model, [_batch(rank, 0)], True)
        exact = torch.cat([g.double().flatten() for g in local.values()]) / world_size
        dist.all_reduce(exact)
        total = torch.zeros_like(exact)
        for _ in range(100):
            replica(_batch(rank, 0)).square().sum().backward()
            total += torch.cat([p.grad.double().flatten() for p in model.parameters()])
            replica.zero_grad()
        errors.append(float((total / 100 - exact).norm() / exact.norm()))
    return tuple(errors)


def test_error_feedback_of_a_constant_gradient():
    """What is left is the rounding of the sum itself, which happens on the wire."""
    for without, with_feedback in run_ranks(_error_feedback, 2):
        assert with_feedback < 0.8 * without


def _composed(rank: int, world_size: int) -> dict[str, list[Tensor]]:
    """The gradient of each step, under each hook."""
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook, powerSGD_hook

    gradients = {}
    for name in ("power", "local"):
        model = _net()
        clip = BucketClip(C, "adaptive")
        # PowerSGD's second collective starts in a callback of the first, on gloo's own threads:
        # with several buckets ranks would start theirs in different orders.
        replica = DistributedDataParallel(model, bucket_cap_mb=1 if name == "power" else 0.004)
        if name == "power":
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=4, start_powerSGD_iter=2
            )
            clip.attach(replica, powerSGD_hook.powerSGD_hook, state)
        else:
            alone = [dist.new_group([r]) for r in range(world_size)][rank]
            state = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=2)
            clip.attach(replica, post_localSGD_hook.post_localSGD_hook, state)
        gradients[name] = []
        for step in range(4):
            replica(_batch(rank, step)).square().sum().backward()
            gradients[name].append(torch.cat([p.grad.flatten() for p in model.parameters()]))
            assert bool(clip.report().finite)
            replica.zero_grad()
    return gradients


def test_hooks_of_pytorch_exchange_the_clipped_buckets():
    first, second = run_ranks(_composed, 2)
    for found in (first, second):
        assert all(0 < g.norm() <= C * 1.0001 for g in [*found["power"][:2], *found["local"]])
        assert all(g.norm() > 0 for g in found["power"])
    apart = {
        name: [float((a - b).norm()) for a, b in zip(first[name], second[name], strict=True)]
        for name in first
    }
    assert apart["power"] == [0.0] * 4
    assert apart["local"][:2] == [0.0] * 2
    assert min(apart["local"][2:]) > 0.1 * C  # each rank its own gradient by then


@pytest.mark.parametrize("policy", POLICIES)
def test_shares_add_up_whatever_buckets_come(policy):
    draw = torch.Generator().manual_seed(derived(1))
    shares = BucketShares(policy, 100)
    device = torch.device("cpu")
    layouts = [[10, 20, 70], [10, 20, 70], [10, 90], [10, 90], [10, 20, 30, 40], [50, 50], [100]]
    for sizes in layouts:
        given = [float(shares.next(n, device)) for n in sizes]
        assert sum(given) == pytest.approx(1.0, rel=1e-5)
        assert min(given) > 0
        shares.end(torch.rand(len(sizes), generator=draw))


def test_adaptive_shares_forget_what_is_not_finite_and_can_be_saved():
    device = torch.device("cpu")

    def shares_after(*passes: list[float]) -> BucketShares:
        shares = BucketShares("adaptive", 4)
        for norms in passes:
            for _ in range(2):
                shares.next(2, device)
            shares.end(torch.tensor(norms))
        return shares

    def given(shares: BucketShares) -> list[float]:
        return [float(shares.next(2, device)) for _ in range(2)]

    want = [0.99 * 0.36 + 0.005, 0.99 * 0.64 + 0.005]
    assert given(shares_after([3.0, 4.0])) == pytest.approx(want)
    assert given(shares_after([3e30, 4e30])) == pytest.approx(want)
    assert given(shares_after([3.0, 4.0], [math.nan, 1.0])) == pytest.approx(want)
    assert given(shares_after([3.0, 4.0], [math.inf, 1.0])) == pytest.approx(want)
    assert given(shares_after([3.0, 4.0], [0.0, 0.0])) == pytest.approx(want)
    assert given(shares_after([0.0, 0.0])) == [0.5, 0.5]
    cut_anew, sizes = shares_after([3.0, 4.0]), (1, 3)
    for numel in sizes:
        cut_anew.next(numel, device)
    cut_anew.end(torch.tensor([math.nan, 1.0]))
    assert [float(cut_anew.next(numel, device)) for numel in sizes] == [0.25, 0.75]
    saved, other = shares_after([3.0, 4.0]), BucketShares("adaptive", 4)
    other.load_state_dict(saved.state_dict())
    assert given(other) == given(saved)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_norm": 0.0}, "max_norm: expected a number above 0, got 0"),
        ({"max_norm": math.nan}, "max_norm: expected a number above 0, got nan"),
        ({"policy": "even"}, "policy: expected one of .*, got 'even'"),
        (
            {"wire_dtype": torch.float64},
            "wire_dtype: expected None, torch.bfloat16 or torch.float16",
        ),
        ({"wire_dtype": torch.float16, "max_norm": 1e5}, "max_norm: expected at most 65504"),
        ({"error_feedback": True}, "error_feedback: expected False without a wire_dtype"),
    ],
)
def test_bad_settings_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        BucketClip(**({"max_norm": 1.0} | arguments))


def test_a_clip_that_is_not_attached_says_so():
    clip = BucketClip(1.0)
    with pytest.raises(RuntimeError, match="no gradient has been synchronised yet"):
        clip.report()
    with pytest.raises(RuntimeError, match="not attached"):
        clip.state_dict()
