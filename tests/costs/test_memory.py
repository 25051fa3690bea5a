"""Bytes of a rank, against what was counted and what a whole model keeps."""

import json
import random
from dataclasses import replace
from typing import get_args

import pytest
import torch

from benchmarks.lib.saved_activations import saved_by
from bert_unpad.batch import VarlenBatch
from bert_unpad.costs.memory import layer_bytes_per_token, memory_of
from bert_unpad.costs.timing import random_inputs
from bert_unpad.costs.workload import Workload
from bert_unpad.data.sampling.histogram import wikipedia_lengths
from bert_unpad.nn import BertConfig, BertEncoder, BertForPreTraining
from bert_unpad.nn.config import PRESETS
from bert_unpad.nn.encoder import Recompute
from tests.support.cost_models import TINY, all_of
from tests.support.encoder_parts import random_parts
from tests.support.paths import ROOT
from tests.support.seeds import derived

BASE, LARGE = (BertConfig(**PRESETS[name]) for name in ("bert-base", "bert-large"))


def test_layers_keep_what_was_counted():
    path = ROOT / "benchmarks/results/cpu/memory.json"
    rows = [r for r in json.loads(path.read_text())["results"] if "bert_unpad" in r["contender"]]
    assert len(rows) == 12
    for row in rows:
        config = {"base": BASE, "large": LARGE}[row["size"]]
        precision = {"float32": "fp32", "bfloat16": "bf16"}[row["dtype"]]
        recompute = row["contender"].split()[-1]
        assert layer_bytes_per_token(config, precision, recompute) == row["bytes_per_token"]


@pytest.mark.parametrize("seed", range(8))
def test_layers_of_any_parts_keep_what_is_computed(seed):
    """Of three layers and two, whose difference is a layer."""
    config = random_parts(
        random.Random(derived(seed)),
        num_hidden_groups=None,
        inner_group_num=1,
        window_pattern=(4,),
        embedding_size=None,
    )
    batch = VarlenBatch.from_lengths([9, 0, 17])
    x = torch.randn(batch.total, config.hidden_size).requires_grad_()
    rng = torch.randint(1 << 60, (12, 2)).unbind()
    kept = []
    for layers in (2, 3):
        encoder = BertEncoder(replace(config, num_hidden_layers=layers)).train()
        keys = rng[: layers * config.keys_per_layer]
        shared = [*keys, batch.cu_seqlens, batch.order_table, batch.position_ids]
        kept.append(saved_by(lambda e=encoder, k=keys: e(x, batch, rng=k), encoder, shared))
    more = kept[1].activations - kept[0].activations
    # Of a layer with distances, also tensors of the buckets, however many tokens there are.
    assert more >= batch.total * layer_bytes_per_token(config, "fp32", "none")
    if config.relative_positions != "disentangled":
        assert more == batch.total * layer_bytes_per_token(config, "fp32", "none")


def test_memory_covers_what_a_whole_model_keeps():
    config = replace(TINY, hidden_size=64, intermediate_size=256, num_hidden_layers=4)
    work = Workload(config, all_of(64), 16, 1, precision="fp32")
    model = BertForPreTraining(config).train()
    inputs = random_inputs(config, [64] * 16)
    for recompute in get_args(Recompute):
        model.bert.encoder.recompute = recompute
        kept = saved_by(lambda: sum(model(inputs)[::2]), model).activations
        memory = memory_of(work, 16, recompute=recompute)
        ours = memory.activations + memory.logits
        assert kept < ours
        # What is not kept: what the backward pass of a layer needs besides, and with `layer` all
        # that this one keeps, out of only four layers.
        assert ours < kept * {"none": 1.5, "gelu": 1.6, "layer": 8}[recompute]


def test_memory_of_the_state():
    work = Workload(BASE, wikipedia_lengths(), 64, 1)
    plain = memory_of(work, 4)
    assert plain.state == pytest.approx(work.parameters * (4 + 2 + 4 + 8))
    state = [memory_of(work, 4, sharers=sharers).state for sharers in (1, 2, 4, 8, 16)]
    assert plain.state - state[1] == pytest.approx(work.parameters * 4)
    assert state == sorted(state, reverse=True)
    assert state[-1] == state[-2]  # a rank has at least the word embedding
    assert work.shard_share(16) == pytest.approx(30528 * 768 / work.parameters)
    assert memory_of(work, 4, compression="power_sgd").state > plain.state
    kept = [memory_of(work, 4, recompute=r).activations for r in get_args(Recompute)]
    assert kept == sorted(kept, reverse=True)
    more = memory_of(work, 8)
    assert plain.activations < more.activations < 2 * plain.activations  # batches even out
