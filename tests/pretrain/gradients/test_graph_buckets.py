"""Gradients of passes that are CUDA graphs, bucket by bucket, with passes that a CPU runs again.

What each rank sends is computed here as well: its own gradient, clipped by the bounds of the
buckets, and averaged.
"""

import math
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bert_unpad import ops
from bert_unpad.batch.graph_shapes import GraphShapes
from bert_unpad.nn import BertForPreTraining, EncoderForPreTraining
from bert_unpad.pretrain.config import ConfigError, PretrainConfig, read_config
from bert_unpad.pretrain.feed.steps import Step, StepCollator
from bert_unpad.pretrain.gradients.cuda_graphs import check_graphs
from bert_unpad.pretrain.gradients.graph_buckets import GraphBuckets, units
from bert_unpad.pretrain.parallel import captured, make_way
from bert_unpad.pretrain.ranks import HostSums, Ranks
from bert_unpad.pretrain.run import Run
from tests.cuda.test_graphs import Uncaptured
from tests.nn.test_bert import TINY, make_inputs, make_model
from tests.support.processes import TIMEOUT, run_ranks

SHAPES = GraphShapes(sequences=5, max_seqlen=TINY.max_position_embeddings, masked_share=0.3)
LENGTHS = [[12, 9, 0, 5, 1], [24, 20, 3], [7, 24], [11]]
SMALL_MB = 0.04  # of a model with 0.6 MB of gradients


def _members(model: BertForPreTraining, buckets: GraphBuckets) -> list[list[str]]:
    """Names of the parameters whose gradients lie in each bucket."""
    return [
        [
            name
            for name, p in model.named_parameters()
            if p.grad.untyped_storage().data_ptr() == bucket.flat.untyped_storage().data_ptr()
        ]
        for bucket in buckets.buckets
    ]


@pytest.mark.parametrize("limit", [None, SMALL_MB, 1e-6])
def test_every_gradient_lies_in_one_bucket(limit):
    model = make_model()
    buckets = GraphBuckets(model, limit)
    members = _members(model, buckets)
    names = [name for name, _ in model.named_parameters()]
    assert sorted(name for some in members for name in some) == sorted(names)
    if limit is None:
        assert len(members) == 1
    elif limit == SMALL_MB:
        assert 5 < len(members) < len(names)
    else:
        assert [len(some) for some in members] == [1] * len(names)
    ready = [bucket.ready for bucket in buckets.buckets]
    assert ready == sorted(ready)
    assert ready[-1] == TINY.num_hidden_layers + 1
    for number, bucket in enumerate(buckets.buckets):
        assert (bucket.index(), bucket.is_last()) == (number, number == len(members) - 1)
        several = len(members[number]) > 1
        assert not several or bucket.flat.nbytes <= (limit or 25) * 2**20
    starts = {
        name: p.grad.data_ptr() - bucket.flat.data_ptr()
        for bucket, some in zip(buckets.buckets, members, strict=True)
        for name, p in model.named_parameters()
        if name in some
    }
    assert all(start % 128 == 0 for start in starts.values())


def test_units_are_the_parts_of_the_model():
    model = make_model()
    heads, *layers, embeddings = units(model)
    assert len(layers) == TINY.num_hidden_layers
    for unit, layer in zip(layers, reversed(model.bert.encoder.layer), strict=True):
        assert unit == list(reversed(list(layer.parameters())))
    assert any(p is model.word_embeddings for p in embeddings)
    assert not any(p is model.word_embeddings for p in heads)
    assert sum(map(len, (heads, *layers, embeddings))) == len(list(model.parameters()))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("recompute", ["none", "gelu", "layer"])
def test_a_bucket_is_complete_when_its_unit_is_marked(recompute, in_place, monkeypatch):
    model = make_model(hidden_dropout_prob=0.2).train()
    model.bert.encoder.recompute = recompute
    if in_place:  # such weight gradients come to `.grad` without autograd
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                ops.accumulate_in_place(module.weight)
    buckets = GraphBuckets(model, SMALL_MB)
    seen: list[tuple[int, list[Tensor]]] = []
    monkeypatch.setattr(
        buckets,
        "_record",
        lambda unit: seen.append((unit, [b.flat.clone() for b in buckets.buckets])),
    )
    for inputs in (make_inputs(), make_inputs([5, 20], 7)):  # the second adds to the first
        seen.clear()
        out = model(inputs)
        (out.mlm_loss_sum + out.nsp_loss_sum).backward()
        assert [unit for unit, _ in seen] == list(range(TINY.num_hidden_layers + 1))
        for unit, flats in seen:
            complete = [
                torch.equal(flat, bucket.flat)
                for flat, bucket in zip(flats, buckets.buckets, strict=True)
            ]
            assert complete == [bucket.ready <= unit for bucket in buckets.buckets]
    with torch.no_grad():  # an evaluation marks nothing
        seen.clear()
        model(make_inputs())
        assert not seen


def test_what_all_layers_use_is_complete_with_the_embeddings():
    parts = {"norm_place": "pre", "first_norm": True}
    model = EncoderForPreTraining(replace(TINY, model_type="bert_unpad", **parts))
    heads, *layers, embeddings = units(model)
    norm = model.bert.encoder.LayerNorm
    assert {norm.weight, norm.bias} <= {*embeddings}
    assert {norm.weight, norm.bias}.isdisjoint([*heads, *(p for unit in layers for p in unit)])
    assert sum(map(len, (heads, *layers, embeddings))) == len(list(model.parameters()))


def test_shared_layers_are_complete_with_the_embeddings(monkeypatch):
    shared = {"model_type": "bert_unpad", "num_hidden_groups": 1}
    model = EncoderForPreTraining(replace(TINY, **shared)).train()
    heads, rest = units(model)
    assert set(heads).isdisjoint(model.bert.encoder.parameters())
    assert set(rest) == {
        *model.bert.encoder.parameters(),
        *model.bert.embeddings.parameters(),
    }
    buckets = GraphBuckets(model, 1e-6)
    seen = []
    monkeypatch.setattr(
        buckets, "_record", lambda unit: seen.append([b.flat.clone() for b in buckets.buckets])
    )
    out = model(make_inputs())
    (out.mlm_loss_sum + out.nsp_loss_sum).backward()
    (flats,) = seen
    complete = [torch.equal(x, b.flat) for x, b in zip(flats, buckets.buckets, strict=True)]
    assert complete == [bucket.ready == 0 for bucket in buckets.buckets]
    assert len(set(complete)) == 2


class _Result(NamedTuple):
    """What a rank has after a step."""

    own: dict[str, Tensor]
    """Its gradient, before anything is clipped or sent."""
    average: dict[str, Tensor]
    norm: float
    clipped: int
    parts: int
    finite: bool
    members: list[list[str]]
    numels: list[int]


def _step(rank: int, number: int, passes: int, padded: bool) -> Step:
    batches = [
        make_inputs(LENGTHS[(rank + i) % 4], 10 * number + rank + 100 * i, masked_fraction=0.15)
        for i in range(passes)
    ]
    collate = StepCollator(
        lambda numbers, epoch, progress: batches[numbers[0]], passes, SHAPES if padded else None
    )
    return collate(torch.arange(passes).numpy(), 0, 0.0)


def _run(
    rank: int, world_size: int, arguments: list[str], steps: int, graphs: bool, poison: int = -1
) -> list[_Result]:
    """Steps of a model whose weights do not change; rank 0's gradient of one step is infinite."""
    config, _ = read_config(
        ["--batching.global_batch_size", "8", "--schedule.total_steps", "9", *arguments]
    )
    config = replace(config, cuda_graphs=graphs)
    ranks = Ranks(
        *(rank, world_size, torch.device("cpu"), dist.new_group(backend="gloo")),
        node_size=2 if world_size == 4 else 1,
        local_rank=rank % 2 if world_size == 4 else 0,
        timeout=timedelta(seconds=TIMEOUT),
    )
    captured.GraphRunner = lambda model, autocast: Uncaptured(model)
    model = make_model()
    way = make_way(Run(config, ranks, model))
    way.make_optimizer()
    way.begin()
    results = []
    passes = config.batching.accumulation
    for number in range(steps):
        step = _step(rank, number, passes, padded=graphs)
        factors = way._loss_factors(step, HostSums(ranks, step.counts))
        plain = make_model()
        for inputs in step.passes:
            out = plain(inputs)
            (out.mlm_loss_sum * factors[0] + out.nsp_loss_sum * factors[1]).backward()
        if way.loss_scale is not None:
            for p in plain.parameters():
                p.grad /= way.loss_scale.value
        if number == poison and rank == 0:
            with torch.no_grad():
                model.cls.seq_relationship.bias[0] = torch.inf
        way.accumulate(step, HostSums(ranks, step.counts))
        report = way.finish()
        with torch.no_grad():
            model.cls.seq_relationship.bias.copy_(plain.cls.seq_relationship.bias)
        buckets = getattr(way, "_buckets", None)
        results.append(
            _Result(
                {name: p.grad.clone() for name, p in plain.named_parameters()},
                {name: p.grad.clone() for name, p in model.named_parameters()},
                float(report.norm),
                int(report.clipped),
                report.parts,
                bool(report.finite),
                _members(model, buckets) if buckets else [],
                [b.flat.numel() for b in buckets.buckets] if buckets else [],
            )
        )
        model.zero_grad(set_to_none=not graphs)
    return results


def _norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(x.double().square().sum()) for x in tensors))


def _expected(
    found: list[list[_Result]], step: int, policy: str, bound: float
) -> dict[str, Tensor]:
    """The average of clipped gradients, from the ranks' own ones."""
    members, numels = found[0][0].members, found[0][0].numels
    average: dict[str, Tensor] = {}
    for results in found:
        sizes = [numel / sum(numels) for numel in numels]
        shares = [1 / len(members)] * len(members)
        if policy == "adaptive":
            shares = sizes
            if step:
                before = results[step - 1].own
                squares = [_norm([before[name] for name in some]) ** 2 for some in members]
                shares = [
                    0.99 * square / sum(squares) + 0.01 * size
                    for square, size in zip(squares, sizes, strict=True)
                ]
        for some, share in zip(members, shares, strict=True):
            norm = _norm([results[step].own[name] for name in some])
            factor = min(1.0, bound * math.sqrt(share) / norm) / len(found)
            for name in some:
                part = results[step].own[name] * factor
                average[name] = average[name] + part if name in average else part
    return average


def _assert_close(got: dict[str, Tensor], want: dict[str, Tensor], rel: float = 2e-5) -> None:
    assert got.keys() == want.keys()
    size = _norm(list(want.values())) / math.sqrt(len(want))
    for name, value in got.items():
        assert _norm([value - want[name]]) <= rel * max(_norm([want[name]]), size), name


BUCKETS = ["--comm.bucket_mb", str(SMALL_MB)]


@pytest.mark.parametrize("policy", ["equal", "adaptive"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_buckets_are_clipped_on_each_rank_and_averaged(world_size, policy):
    clip = ["--clip.mode", "bucket", "--clip.max_norm", "0.7", "--clip.policy", policy]
    arguments = [*BUCKETS, *clip, "--batching.accumulation", "2"]
    found = run_ranks(_run, world_size, arguments, 3, True)
    assert len(found[0][0].members) > 5
    for step in range(3):
        want = _expected(found, step, policy, 0.7)
        for results in found:
            result = results[step]
            _assert_close(result.average, want)
            assert _norm(list(result.average.values())) <= 0.7 * (1 + 1e-5)
            assert result.norm == pytest.approx(_norm(list(result.own.values())), rel=1e-4)
            assert result.parts == len(result.members)
            assert 0 < result.clipped <= result.parts
            assert result.finite
            for name, value in result.average.items():
                assert torch.equal(value, found[0][step].average[name])


@pytest.mark.parametrize("mode", ["after", "none", "before"])
def test_other_modes_are_as_without_graphs(mode):
    """Of passes padded for graphs, so the sums have more zeros."""
    arguments = ["--clip.mode", mode, "--clip.max_norm", "0.7", "--batching.accumulation", "2"]
    arguments += [] if mode == "before" else BUCKETS
    graphs, plain = (run_ranks(_run, 2, arguments, 2, graphs) for graphs in (True, False))
    for got, want in zip(graphs[0] + graphs[1], plain[0] + plain[1], strict=True):
        _assert_close(got.average, want.average)
        assert got.norm == pytest.approx(want.norm, rel=1e-4)
        assert (got.clipped, got.parts, got.finite) == (want.clipped, want.parts, want.finite)
    assert bool(graphs[0][0].members) == (mode != "before")


@pytest.mark.parametrize(
    ("more", "rel"),
    [
        (["--clip.wire_dtype", "bf16"], 2e-2),
        (["--clip.wire_dtype", "fp16"], 4e-3),
        (["--precision", "fp16", "--loss_scale.initial", "4"], 2e-5),
        (["--comm.hook", "hierarchical"], 2e-5),
    ],
)
def test_wires_scales_and_hooks(more, rel):
    arguments = [*BUCKETS, "--clip.mode", "bucket", "--clip.max_norm", "0.7", *more]
    found = run_ranks(_run, 2, arguments, 2, True)
    for step in range(2):
        want = _expected(found, step, "equal", 0.7)
        for results in found:
            _assert_close(results[step].average, want, rel)


def test_two_hops_with_two_nodes():
    arguments = ["--clip.mode", "bucket", "--clip.max_norm", "0.7", "--comm.hook", "hierarchical"]
    found = run_ranks(_run, 4, [*BUCKETS, *arguments], 1, True)
    want = _expected(found, 0, "equal", 0.7)
    for results in found:
        _assert_close(results[0].average, want)


@pytest.mark.parametrize("mode", ["bucket", "after"])
def test_an_overflow_is_seen_by_all_ranks_and_leaves_nothing_behind(mode):
    arguments = [*BUCKETS, "--clip.mode", mode, "--clip.max_norm", "0.7"]
    found = run_ranks(_run, 2, arguments, 3, True, 1)
    for results in found:
        assert [result.finite for result in results] == [True, False, True]
        assert all(torch.isfinite(value).all() for value in results[2].average.values())
        if mode == "bucket":
            _assert_close(results[2].average, _expected(found, 2, "equal", 0.7))


def _interrupted(rank: int, world_size: int) -> bool:
    """Whether a second run, with the state of the first, clips as the first goes on to do."""
    arguments = [*BUCKETS, "--batching.global_batch_size", "8", "--schedule.total_steps", "9"]
    arguments += ["--clip.mode", "bucket", "--clip.policy", "adaptive", "--clip.max_norm", "0.7"]
    config = replace(read_config(arguments)[0], cuda_graphs=True)
    ranks = Ranks(rank, world_size, torch.device("cpu"), dist.new_group(backend="gloo"))
    captured.GraphRunner = lambda model, autocast: Uncaptured(model)
    kept = []
    state: dict[str, Any] = {}
    for steps in (range(3), range(2, 3)):
        model = make_model()
        way = make_way(Run(config, ranks, model))
        way.load_state_dict(state)
        way.make_optimizer()
        way.begin()
        for number in steps:
            if number == 2 and not state:
                state = way.state_dict()
            step = _step(rank, number, 1, padded=True)
            way.accumulate(step, HostSums(ranks, step.counts))
            way.finish()
            kept.append([p.grad.clone() for p in model.parameters()])
            model.zero_grad(set_to_none=False)
    return all(map(torch.equal, kept[2], kept[3]))


def test_shares_are_resumed():
    assert run_ranks(_interrupted, 2) == [True, True]


def _config(*arguments: str) -> PretrainConfig:
    needed = ["--batching.global_batch_size", "8", "--schedule.total_steps", "9"]
    return read_config([*needed, "--cuda_graphs", "true", *arguments])[0]


@pytest.mark.parametrize("mode", ["bucket", "before", "after", "none"])
@pytest.mark.parametrize("hook", ["allreduce", "hierarchical"])
def test_what_graphs_can_be_used_with(mode, hook):
    cuda = torch.device("cuda")
    check_graphs(_config("--clip.mode", mode, "--comm.hook", hook), Ranks(0, 2, cuda, None))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--comm.hook", "power_sgd"], "comm.hook: expected allreduce or hierarchical with cuda"),
        (["--comm.hook", "post_local_sgd"], "comm.hook: .* several ranks .*, got post_local_sgd$"),
        (["--comm.hook", "dream_ddp"], "comm.hook: .* got dream_ddp"),
        (["--comm.hook", "gradient_flow"], "comm.hook: .* got gradient_flow"),
        (["--optimizer.name", "mt_dao"], "optimizer.name: .* than mt_dao, .* got mt_dao"),
    ],
)
def test_what_graphs_cannot_be_used_with(arguments, message):
    cuda = torch.device("cuda")
    with pytest.raises(ConfigError, match=message):
        check_graphs(_config(*arguments), Ranks(0, 2, cuda, None))
    check_graphs(_config(*arguments), Ranks(0, 1, cuda, None))
