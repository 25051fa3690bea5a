"""What an update costs in each stage of a schedule of growth: CPU time, exchanged bytes, memory.

    python -m benchmarks.lib.growth_cost '{"layers": 12, ...}'       # memory of one stage, as JSON

All stages take turns, each on the same examples in the same round, in one process of one thread.
Seconds are CPU time of the process, which other processes of the machine disturb less than wall
time. Memory is measured in a process for each stage.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.lib import harness
from bert_unpad.batch import PackedInputs, VarlenBatch
from bert_unpad.data import DataConfig, PackedCollator, prepare
from bert_unpad.nn import BertConfig, BertForPreTraining
from bert_unpad.pretrain.config import OptimizerConfig
from bert_unpad.pretrain.growth import Growth, Stage, freeze
from bert_unpad.pretrain.update.optimizer import build_optimizer

ROOT = Path(__file__).resolve().parents[2]
# What of a stage its cost depends on.
_FIELDS = ("layers", "frozen")


def key(growth: Growth, index: int) -> str:
    """Names what stages of equal cost have in common."""
    stage = growth.stages[index]
    parts = [f"{name} {getattr(stage, name)}" for name in _FIELDS]
    return ", ".join(parts + (["layers left out"] if growth.active_layers else []))


def measure(
    growths: Mapping[str, Growth], layers: int, options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Costs by `key`: cpu_seconds (median), communicated_bytes, and bytes of memory.

    Args:
        growths: the schedules.
        layers: of the model in the end.
        options: hidden, vocab, length, batch, steps, rounds.
    """
    torch.set_num_threads(1)
    harness.fix_allocator("heap")
    stages = {
        key(growth, index): (growth, stage)
        for growth in growths.values()
        for index, stage in enumerate(growth.stages)
    }
    data = prepare(DataConfig(max_seq_length=options.length, vocab_size=options.vocab))
    collator, draw = data.collator(), np.random.default_rng(0)
    config = _config(data.tokenizer.vocab_size, layers, options)
    models = {name: _model(config, stage) for name, (_, stage) in stages.items()}
    times: dict[str, list[float]] = {name: [] for name in stages}
    for number in range(1 + options.rounds):
        inputs = _examples(collator, draw, options.batch)
        step = int(draw.integers(options.steps))
        for name, (growth, _) in stages.items():
            model, optimizer = models[name]
            if growth.active_layers is not None:
                model.bert.encoder.active_layers = growth.active_layers(step)
            start = time.process_time()
            _update(model, optimizer, inputs)
            if number:  # the first loads what is loaded lazily
                times[name].append(time.process_time() - start)
    sizes = vars(options) | {"layers": layers}
    sizes = {name: sizes[name] for name in ("layers", "hidden", "vocab", "length", "batch")}
    costs = {}
    for name, (growth, stage) in stages.items():
        # Of layers that are left out at random the mean counts, of others the median is steadier.
        middle = statistics.mean if growth.active_layers else statistics.median
        costs[name] = {
            "cpu_seconds": middle(times[name]),
            "communicated_bytes": _communicated(models[name][0]),
            **_memory(sizes, stage),
        }
    return costs


def _config(vocab: int, layers: int, options: argparse.Namespace) -> BertConfig:
    return BertConfig(
        vocab_size=vocab,
        hidden_size=options.hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(options.hidden // 32, 1),
        intermediate_size=4 * options.hidden,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=options.length,
    )


def _model(config: BertConfig, stage: Stage) -> tuple[BertForPreTraining, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = BertForPreTraining(dataclasses.replace(config, num_hidden_layers=stage.layers)).train()
    freeze(model, stage)
    return model, build_optimizer(model, OptimizerConfig())


def _examples(collator: PackedCollator, draw: np.random.Generator, count: int) -> PackedInputs:
    return collator(draw.integers(0, len(collator.dataset), count), 0)


def _update(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: PackedInputs) -> None:
    outputs = model(inputs)
    (outputs.mlm_loss_sum / 100 + outputs.nsp_loss_sum / 10).backward()
    optimizer.step()
    optimizer.zero_grad()


def _communicated(model: BertForPreTraining) -> int:
    """Bytes that DDP hands to the exchange in one backward pass, on each rank."""
    count = 0

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        nonlocal count
        count += bucket.buffer().nbytes
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    hook.__annotations__ |= {  # DDP compares objects
        "bucket": dist.GradBucket,
        "return": torch.futures.Future[torch.Tensor],
    }
    kept, model.bert.encoder.active_layers = model.bert.encoder.active_layers, None
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            replica = DistributedDataParallel(model)
            replica.register_comm_hook(None, hook)
            outputs = replica(_empty())
            (outputs.mlm_loss_sum + outputs.nsp_loss_sum).backward()
        finally:
            dist.destroy_process_group()
    model.zero_grad()
    model.bert.encoder.active_layers = kept
    return count


def _empty() -> PackedInputs:
    return PackedInputs.build(VarlenBatch.from_lengths([]), torch.empty(0, dtype=torch.int64))


def _memory(sizes: dict[str, int], stage: Stage) -> dict[str, int]:
    request = sizes | {"stage": {name: getattr(stage, name) for name in _FIELDS}}
    command = [sys.executable, "-m", "benchmarks.lib.growth_cost", json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _answer(request: dict[str, Any]) -> dict[str, int]:
    """Memory of one stage: what stays between updates, and what the peak of an update adds."""
    torch.set_num_threads(1)
    options = argparse.Namespace(**request)
    data = prepare(DataConfig(max_seq_length=options.length, vocab_size=options.vocab))
    config = _config(data.tokenizer.vocab_size, options.layers, options)
    stage = Stage(1, max_seq_length=options.length, **request["stage"])
    model, optimizer = _model(config, stage)
    collator, draw = data.collator(), np.random.default_rng(1)
    few, many = (_examples(collator, draw, count) for count in (2, options.batch))
    memory = harness.memory_of(
        optimizer, lambda: _update(model, optimizer, few), lambda: _update(model, optimizer, many)
    )
    weights = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    return {"state_bytes": memory.state + weights, "step_bytes": memory.step}


if __name__ == "__main__":
    print(json.dumps(_answer(json.loads(sys.argv[1]))))
