"""Plans of every method and recipe of the trainer: sharding, one bit, growth, replaced tokens."""

from dataclasses import replace
from typing import get_args

import pytest

from bert_unpad._choices import OptimizerName, Precision
from bert_unpad.costs.compute import ComputeCost
from bert_unpad.costs.device import Device
from bert_unpad.costs.gradient_buckets import num_parameters
from bert_unpad.costs.network import Cluster, Link
from bert_unpad.costs.optimizers import APART_PERIOD
from bert_unpad.costs.workload import OPTIMIZERS, PRECISIONS, Part, Workload
from bert_unpad.data.sampling.histogram import wikipedia_lengths
from bert_unpad.nn import BertConfig
from bert_unpad.nn.config import PRESETS, EncoderConfig
from bert_unpad.nn.replaced_tokens import generator_config
from bert_unpad.plan import CARDS, Allowed, Candidate, Planner, alternatives, best, card_device
from bert_unpad.plan.candidates import IN_PASSES, SHARDS, allowed_with
from bert_unpad.plan.inputs import workload_of
from bert_unpad.plan.options import make_parser
from tests.support.cost_models import TINY, all_of
from tests.support.paths import CONFIGS

RECIPES = sorted(CONFIGS.glob("*.yaml"))
SLOW = Cluster(1, network=Link(1e-3, 1e6))


def by_hand(**changes) -> Planner:
    work = Workload(TINY, all_of(50), 16, 10, precision="fp32", **changes)
    device = Device("by hand", 1e9, ComputeCost(1e-3, 0, 0.01), 0.06, 0.02, 0.005)
    return Planner(work, device, SLOW, bucket_bytes=1e9)


def workload(path, *changed: str) -> Workload:
    arguments = [f"--model={path}", *(f"--set={one}" for one in changed)]
    return workload_of(make_parser().parse_args(arguments))[0]


def test_all_that_the_trainer_has_is_known():
    assert get_args(Precision) == PRECISIONS
    assert set(get_args(OptimizerName)) == set(OPTIMIZERS)
    assert SHARDS[0] == "none"
    assert set(IN_PASSES) < set(SHARDS)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_plans_as_it_is(path):
    pytest.importorskip("jsonargparse")
    work = workload(path)
    device = card_device(CARDS["h100"], work)
    cluster = Cluster(4, Link(2e-6, 3e11), Link(1e-5, 5e10))
    choice = best(Planner(work, device, cluster), 1, Allowed())
    assert choice is not None
    low, high = choice.days_band
    assert 0 < low < choice.days < high


def test_sizes_of_runs_that_are_not_here():
    pytest.importorskip("jsonargparse")
    first, second = (workload(CONFIGS / f"bert_base_phase{n}.yaml") for n in (1, 2))
    assert second.parameters == first.parameters
    assert workload(CONFIGS / "bert_large_mlperf.yaml").parameters == pytest.approx(336e6, rel=0.01)
    assert workload(CONFIGS / "bert_large_mlperf.yaml").strategy == "exchange"
    changed = "batching.scope=node"
    assert workload(CONFIGS / "bert_large_mlperf.yaml", changed).strategy == "exchange_node"


def test_overlap_hides_weights_and_sends_half_an_allreduce_of_gradients():
    planner = by_hand()
    size = 4 * planner.workload.parameters
    whole = SLOW.allreduce(size, 2)
    time = planner.update_time(Candidate(2, 8, shard="overlap"))
    forward = (0.01 + 8 * 50 * 1e-3) / 3
    assert time.allreduce == pytest.approx(whole / 2)  # one bucket, full when the pass ends
    assert time.weights == pytest.approx(max(whole / 2 - forward, 0), abs=1e-9)
    assert time.update == pytest.approx((0.06 + 0.02) / 2)
    # FSDP gathers weights twice a pass, and keeps a rank's part of everything.
    slow = replace(SLOW, network=Link(1e-3, 1e4))
    slower = Planner(planner.workload, planner.device, slow, bucket_bytes=1e9)
    once = slower.update_time(Candidate(2, 8, shard="overlap")).weights
    assert once > 0
    assert slower.update_time(Candidate(2, 8, shard="fsdp")).weights == pytest.approx(2 * once)
    held = {shard: planner.memory(Candidate(2, 8, shard=shard)) for shard in ("none", *IN_PASSES)}
    assert held["overlap"].optimizer == held["none"].optimizer / 2
    assert held["overlap"].weights == held["none"].weights
    assert held["fsdp"].weights == held["none"].weights / 2
    assert held["fsdp"].gradients == held["none"].gradients / 2


def test_a_cluster_hides_less_where_kernels_and_collectives_slow_each_other():
    planner = by_hand()
    half = replace(SLOW, hidden=0.5)
    candidate = Candidate(2, 8, shard="overlap")
    slower = Planner(planner.workload, planner.device, half, bucket_bytes=1e9)
    slow, plain = (one.update_time(candidate).network for one in (slower, planner))
    assert slow >= plain


def test_optimizers_that_communicate_do_so_in_one_way():
    one_bit = by_hand(optimizer="onebit_adam")
    time = one_bit.update_time(Candidate(2, 8, compression="one_bit"))
    assert time.network == pytest.approx(SLOW.allreduce(one_bit.workload.parameters / 8, 2))
    for name in ("onebit_adam", "onebit_lamb", "zero_one_adam"):
        allowed = allowed_with(by_hand(optimizer=name).workload, Allowed())
        assert (allowed.compressions, allowed.shards) == (("one_bit",), ("none",))
    local = by_hand(optimizer="mt_dao")
    assert allowed_with(local.workload, Allowed()).local_sgd_periods == (APART_PERIOD,)
    time = local.update_time(Candidate(2, 8, local_sgd_period=APART_PERIOD))
    moments = 4 * 4 * local.workload.parameters  # of weights and three averages
    assert time.allreduce == 0
    assert time.weights == pytest.approx(SLOW.allreduce(moments, 2) / APART_PERIOD)
    assert alternatives(local, 2, Allowed()) == []
    choice = best(local, 2, Allowed())
    assert "post_local_sgd" not in " ".join(choice.candidate.trainer_arguments(16))
    assert allowed_with(by_hand(optimizer="muon").workload, Allowed()).shards == ("none",)
    plain = allowed_with(by_hand().workload, Allowed(compressions=("none", "one_bit")))
    assert plain.compressions == ["none"]


def test_exchange_leaves_no_straggler():
    large = BertConfig(**PRESETS["bert-large"])
    work = Workload(large, wikipedia_lengths(), 512, 10, strategy="random")
    device = card_device(CARDS["a100-80"], work)
    cluster = Cluster(8, Link(0, 1e15), Link(0, 1e15))
    times = {
        strategy: Planner(replace(work, strategy=strategy), device, cluster)
        .update_time(Candidate(8, 8))
        .straggler
        for strategy in ("random", "exchange_node", "exchange")
    }
    assert times["random"] > times["exchange_node"] > times["exchange"] >= 0


def test_parts_of_a_run_take_their_own_time():
    whole = by_hand()
    shallow = replace(whole.workload, config=replace(TINY, num_hidden_layers=1))
    small = replace(whole.workload, global_batch=8)
    candidate = Candidate(1, 16)
    full = whole.update_time(candidate).total
    assert whole.run_seconds(candidate) == pytest.approx(10 * full)
    grown = by_hand(parts=(Part(4, shallow),))
    assert 6 * full < grown.run_seconds(candidate) < 10 * full
    warmed = by_hand(parts=(Part(4, small),))
    assert warmed.run_seconds(candidate) == pytest.approx(6 * full + 4 * (full - 8 * 50 * 1e-3))
    frozen = by_hand(parts=(Part(10, whole.workload, 0.5),))
    assert frozen.run_seconds(candidate) == pytest.approx(10 * (full - 0.5 * 16 * 50 * 1e-3))


@pytest.mark.parametrize(
    ("changed", "faster"),
    [
        (("growth.name=stacking",), True),
        (("growth.name=mslt",), True),
        (("growth.name=layer_drop",), True),
        (("growth.name=lengths", "growth.lengths=[32,128]"), True),
        (("batching.warmup_batch_size=4", "batching.warmup_steps=300"), True),
        (("growth.name=none",), False),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_recipes_with_stages(changed, faster):
    pytest.importorskip("jsonargparse")
    work = workload(CONFIGS / "bert_small.yaml", *changed)
    assert bool(work.parts) == faster
    device = Device("by hand", 1e12, ComputeCost(1e-6, 1e-9), 1e-3)
    planner = Planner(work, device, SLOW)
    plain = Planner(replace(work, parts=()), device, SLOW)
    candidate = Candidate(1, 16)
    assert (planner.run_seconds(candidate) < plain.run_seconds(candidate)) == faster
    assert sum(part.updates for part in work.parts) <= work.updates


def test_replaced_tokens_have_two_encoders():
    model = EncoderConfig(**PRESETS["electra-small"])
    generator = generator_config(model, 0.25)
    alone = Workload(model, all_of(128), 8, 1)
    both = replace(alone, generator=generator)
    shared = model.padded_vocab_size * model.embedding_width
    assert both.parameters == alone.parameters + num_parameters(generator) - shared
    costs = [card_device(CARDS["h100"], work).passes for work in (alone, both)]
    assert costs[1].linear > costs[0].linear
    assert costs[1].fixed > costs[0].fixed
    memory = [
        Planner(work, card_device(CARDS["h100"], work), SLOW).memory(Candidate(1, 8))
        for work in (alone, both)
    ]
    assert memory[1].activations > memory[0].activations
