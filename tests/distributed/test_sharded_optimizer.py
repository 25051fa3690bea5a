"""ShardedOptimizer on 2 and 3 ranks, against DDP and the same optimizer without shards."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bert_unpad.distributed import (
    BucketClip,
    ShardedOptimizer,
    gradient_shards,
    sharded_optimizer,
)
from bert_unpad.optim import (
    FusedAdam,
    Muon,
    decay_groups,
)
from tests.support.processes import run_ranks
from tests.support.shard_nets import Net, batch, loss_of, net
from tests.support.sharded_training import (
    CAP,
    KINDS,
    STEPS,
    assert_close,
    assert_same_on_all_ranks,
    plain,
    sharded,
    train,
    weights,
)


def against_ddp(rank: int, world_size: int, kind: str, parts: int) -> None:
    ours, theirs = net(rank), net()  # the first rank's weights are everyone's
    train(ours, sharded(ours, kind), rank, parts=parts)
    replica = DistributedDataParallel(theirs)
    train(replica, plain(theirs, kind), rank, parts=parts)
    got, want = weights(ours), weights(theirs)
    if kind == "fused" and world_size == 2:
        assert all(torch.equal(got[name], want[name]) for name in want)
    assert_close(got, want)
    assert_same_on_all_ranks(ours)
    for name, start in net().named_parameters():
        assert torch.equal(start, want[name]) == name.startswith("frozen"), name


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_as_with_ddp(kind):
    run_ranks(against_ddp, 2, kind, 1)


@pytest.mark.parametrize("kind", ["fused", "lamb", "stable"])
def test_three_ranks_accumulate_and_train_as_with_ddp(kind):
    run_ranks(against_ddp, 3, kind, 2)


def _used(rank: int, step: int) -> bool:
    """By all ranks, by one, and by none."""
    return step == 0 or (step == 1 and rank == 0)


def unused(rank: int, world_size: int) -> None:
    for kind in ("fused", "lamb"):
        ours, theirs = net(), net()
        optimizer = sharded(ours, kind, find_unused_parameters=True)
        train(ours, optimizer, rank, uses=_used)
        replica = DistributedDataParallel(theirs, find_unused_parameters=True)
        other = plain(theirs, kind)
        train(replica, other, rank, uses=_used)
        assert_close(weights(ours), weights(theirs))
        state, numbers = optimizer.state_dict()["state"], other.state_dict()["state"]
        assert {i: int(s["step"]) for i, s in state.items()} == {
            i: int(s["step"]) for i, s in numbers.items()
        }
        assert sorted({int(s["step"]) for s in state.values()}) == [2, STEPS]


def test_parameters_that_some_or_no_ranks_use():
    run_ranks(unused, 3)


def clipped_after(rank: int, world_size: int) -> None:
    ours, theirs = net(), net()
    optimizer = sharded(ours, max_norm=0.3)
    train(ours, optimizer, rank)
    replica = DistributedDataParallel(theirs)
    train(replica, plain(theirs), rank, max_norm=0.3)
    assert_close(weights(ours), weights(theirs))


def test_clipping_the_average():
    run_ranks(clipped_after, 3)


def _local_gradient(model: Net, ids: Tensor) -> dict[str, Tensor]:
    bare = copy.deepcopy(model)
    assert all(p.grad is None for p in bare.parameters())
    loss_of(bare(ids), ids).backward()
    return {name: p.grad for name, p in bare.named_parameters() if p.requires_grad}


def _average(optimizer: ShardedOptimizer) -> dict[nn.Parameter, Tensor]:
    """What the ranks hold of the averaged gradient, put together."""
    whole = {}
    for bucket in optimizer._gradients.buckets:
        parts = [torch.empty_like(bucket.shard) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, bucket.shard)
        whole |= zip(bucket.parameters, bucket.views(torch.cat(parts)), strict=True)
    return whole


def clipped_before(rank: int, world_size: int, policy: str, wire: torch.dtype | None) -> None:
    model, bound = net(), 0.5
    optimizer = sharded(model, clip=BucketClip(bound, policy, wire))
    before: list[float] = []
    for step in range(3):
        ids = batch(rank, step)
        optimizer.wait()
        local = {model.get_parameter(n): g for n, g in _local_gradient(model, ids).items()}
        loss_of(model(ids), ids).backward()
        report = optimizer.reduce_gradients()
        buckets = [bucket.parameters for bucket in optimizer._gradients.buckets]
        assert len(buckets) > 3
        sizes = [sum(p.numel() for p in bucket) for bucket in buckets]
        by_size = [size / sum(sizes) for size in sizes]
        flat = [torch.cat([local[p].flatten() for p in bucket]).double() for bucket in buckets]
        norms = [float(x.norm()) for x in flat]
        assert report.norms.tolist() == pytest.approx(norms, rel=1e-4)
        shares = by_size  # of the first pass
        if step and policy == "equal":
            shares = [1 / len(buckets)] * len(buckets)
        elif step and policy == "adaptive":
            total = sum(x * x for x in before)
            shares = [0.99 * x * x / total + 0.01 * s for x, s in zip(before, by_size, strict=True)]
        bounds = [bound * share**0.5 for share in shares]
        assert report.bounds.tolist() == pytest.approx(bounds, rel=1e-4)
        assert bool(report.finite)
        before, average = norms, _average(optimizer)
        for bucket, x, norm, limit in zip(buckets, flat, norms, bounds, strict=True):
            want = x * min(1.0, limit / norm) / world_size
            dist.all_reduce(want)
            got = torch.cat([average[p].flatten() for p in bucket]).double()
            close = 1e-5 if wire is None else 2**-8
            torch.testing.assert_close(got, want, rtol=close, atol=close * float(want.abs().max()))
        assert int(report.clipped) > 0
        optimizer.step()
    assert_same_on_all_ranks(model)


@pytest.mark.parametrize("policy", ["equal", "numel", "adaptive"])
def test_clipping_each_ranks_buckets(policy):
    run_ranks(clipped_before, 2, policy, None)


def test_clipping_with_16_bits_on_the_wire():
    run_ranks(clipped_before, 3, "equal", torch.bfloat16)


def not_finite(rank: int, world_size: int) -> None:
    for clip in (None, {"max_norm": 1.0}, {"max_norm": 9.0, "wire_dtype": torch.bfloat16}):
        for kind in ("fused", "lamb", "sgd"):
            model = net()
            optimizer = sharded(model, kind, clip=None if clip is None else BucketClip(**clip))
            train(model, optimizer, rank, range(2))
            before = weights(model)
            ids = batch(rank, 2)
            loss = loss_of(model(ids), ids)
            if rank == 1:  # one row of one parameter
                loss = loss + model.blocks[1].out.weight[3].sum() * float("inf")
            loss.backward()
            assert not bool(optimizer.reduce_gradients().finite)
            optimizer.step()
            assert all(torch.equal(v, before[n]) for n, v in weights(model).items())
            train(model, optimizer, rank, range(3, 5))
            for name, value in weights(model).items():
                assert value.isfinite().all()
                assert name.startswith("frozen") or not torch.equal(value, before[name])
            steps = {
                int(s["step"]) for s in optimizer.state_dict()["state"].values() if "step" in s
            }
            assert steps == (set() if kind == "sgd" else {4})


def test_what_is_not_finite_on_one_rank_is_left_out_on_all():
    run_ranks(not_finite, 2)


def masters(rank: int, world_size: int) -> None:
    def start() -> nn.Module:
        return net().bfloat16()

    options = {"lr": 1e-2, "master_weights": True}
    ours, theirs = start(), start()
    optimizer = ShardedOptimizer(
        ours, decay_groups(ours, 0.1), FusedAdam, bucket_cap_mb=CAP, **options
    )
    train(ours, optimizer, rank)
    other = FusedAdam(decay_groups(theirs, 0.1), **options)
    train(DistributedDataParallel(theirs), other, rank)
    got, want = optimizer.state_dict()["state"], other.state_dict()["state"]
    for number, state in want.items():
        for name, value in state.items():
            assert got[number][name].dtype == value.dtype == torch.float32
            torch.testing.assert_close(got[number][name], value, rtol=1e-2, atol=1e-2)
            assert got[number][name].shape == value.shape


def test_16_bit_parameters_with_masters():
    run_ranks(masters, 2)


class Sent:
    """Counts the bytes that a rank sends in messages and allreduces."""

    def __init__(self) -> None:
        self.bytes = 0.0
        share = 1 - 1 / dist.get_world_size()
        # What is sent of the first argument; of an allreduce the best that it can do.
        for name, factor in (("isend", 1.0), ("all_reduce", 2 * share)):
            setattr(dist, name, self._counted(getattr(dist, name), factor))

    def _counted(self, function: Any, factor: float) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.bytes += args[0].nbytes * factor
            return function(*args, **kwargs)

        return call


class Wide(nn.Module):
    """Sizes as of a small real layer, still divisible by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(101, 101) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def bytes_of(rank: int, world_size: int) -> None:
    sent = Sent()
    for kind, wire in (("fused", None), ("lans", None), ("stable", torch.bfloat16)):
        model = Wide()
        clip = BucketClip(1.0, wire_dtype=wire)
        optimizer, options = KINDS[kind]
        ours = ShardedOptimizer(
            model, model.parameters(), optimizer, bucket_cap_mb=0.05, clip=clip, **options
        )
        for _ in range(3):
            sent.bytes = 0.0
            model(torch.ones(2, 101)).sum().backward()
            ours.step()
            ours.wait()
        gradient = sum(p.nbytes for p in model.parameters()) * (1 - 1 / world_size)
        ddp = 2 * gradient if wire is None else 1.5 * gradient
        assert ddp <= sent.bytes < 1.02 * ddp
        state = ours.optim.state.values()
        held = sum(v.nbytes for values in state for v in values.values())
        whole = sum(2 * p.nbytes for p in model.parameters())
        assert held < 1.01 * whole / world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_bytes_sent_are_those_of_an_allreduce_and_ranks_keep_a_part_of_the_state(world_size):
    run_ranks(bytes_of, world_size)


def overlaps(rank: int, world_size: int) -> None:
    model = Wide()
    ours = ShardedOptimizer(model, model.parameters(), FusedAdam, bucket_cap_mb=0.03)
    events: list[str] = []
    x = torch.ones(2, 101, requires_grad=True)

    def pass_once() -> None:
        model(x).sum().backward()
        ours.step()

    pass_once()
    assert [len(b.parameters) for b in ours._gradients.buckets] == [2, 2, 2, 2]

    def noted(start: Callable, what: str) -> Callable:
        def starting(*args: Any) -> Callable[[], None]:
            events.append(f"{what} sent")
            finish = start(*args)

            def wait() -> None:
                events.append(f"{what} arrived")
                finish()

            return wait

        return starting

    sharded_optimizer.start_all_gather = noted(sharded_optimizer.start_all_gather, "weights")
    gradient_shards.start_reduce_scatter = noted(gradient_shards.start_reduce_scatter, "gradient")
    for number, layer in enumerate(model.layers):
        layer.register_forward_hook(lambda *_, n=number: events.append(f"forward {n}"))
        layer.register_full_backward_hook(lambda *_, n=number: events.append(f"backward {n}"))
    ours.wait()
    pass_once()
    # The gradient of a layer is sent before the backward pass of the one below has ended.
    backward = events[events.index("forward 3") : events.index("weights sent")]
    for number in (3, 2, 1):
        sent = [i for i, event in enumerate(backward) if event == "gradient sent"][3 - number]
        assert sent < backward.index(f"backward {number - 1}")
    assert backward.count("gradient sent") == backward.count("gradient arrived") == 4
    assert backward.index("gradient arrived") > backward.index("backward 0")
    # Weights arrive right before the layers that need them, in their order.
    events.clear()
    model(x)
    assert events == [e for n in range(4) for e in ("weights arrived", f"forward {n}")]


def test_gradients_are_sent_in_the_backward_pass_and_weights_awaited_in_the_forward_pass():
    run_ranks(overlaps, 2)


def refusals(rank: int, world_size: int) -> None:
    model = net()
    with pytest.raises(ValueError, match="params: expected all that require a gradient, not bias"):
        ShardedOptimizer(model, [p for n, p in model.named_parameters() if n != "bias"], FusedAdam)
    with pytest.raises(ValueError, match="params: expected parameters of the module, got 1 others"):
        ShardedOptimizer(model, [*model.parameters(), nn.Parameter(torch.ones(2))], FusedAdam)
    with pytest.raises(ValueError, match="max_norm: expected a number above 0, got 0"):
        sharded(model, max_norm=0)
    with pytest.raises(ValueError, match="expected one that can update parts of parameters, got M"):
        ShardedOptimizer(model, [{"params": model.parameters(), "use_muon": False}], Muon)
    odd = nn.Linear(3, 4)
    odd.weight = nn.Parameter(torch.ones(3, 4).t())
    with pytest.raises(ValueError, match="expected contiguous parameters, got weight"):
        ShardedOptimizer(odd, odd.parameters(), FusedAdam)
    model = net()
    optimizer = sharded(model)
    with pytest.raises(RuntimeError, match="expected all parameters in the constructor"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    ids = batch(rank, 0)
    loss_of(model(ids, False), ids).backward()
    with pytest.raises(
        RuntimeError, match=r"got none of spare\.weight, spare\.bias; give find_unu"
    ):
        optimizer.step()
    optimizer.zero_grad()
    loss_of(model(ids), ids).backward()
    with pytest.raises(RuntimeError, match="expected one backward pass per step, got another"):
        loss_of(model(ids), ids).backward()
    optimizer.zero_grad()
    train(model, optimizer, rank, range(1))
    dense = model.blocks[0].dense
    with pytest.raises(RuntimeError, match=r"blocks\.0\.dense\.\w+ was used before its update"):
        (dense.weight.sum() + dense.bias.sum()).backward()
    optimizer.wait()
    bad = optimizer.state_dict()
    bad["state"][0]["exp_avg"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"expected exp_avg of the parameter's shape, \[11, 7\]"):
        optimizer.load_state_dict(bad)
    bad["param_groups"] = bad["param_groups"][:1]
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(bad)


def test_what_cannot_be_done_is_refused():
    run_ranks(refusals, 2)


def by_closure_and_schedule(rank: int, world_size: int) -> None:
    ours, theirs = net(), net()
    replica = DistributedDataParallel(theirs)
    for model, optimizer in ((ours, sharded(ours)), (replica, plain(theirs))):
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        for step in range(3):
            ids = batch(rank, step)

            def closure(model=model, ids=ids) -> Tensor:
                loss = loss_of(model(ids), ids)
                loss.backward()
                return loss

            assert float(optimizer.step(closure)) > 0
            optimizer.zero_grad()
            schedule.step()
    assert_close(weights(ours), weights(theirs))


def test_closures_and_schedules_work_as_with_any_optimizer():
    run_ranks(by_closure_and_schedule, 2)
