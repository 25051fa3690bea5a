"""What a plan takes from a recipe: sizes, batches, and which updates differ from the others."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bert_unpad.costs.workload import STRATEGIES, Part, Workload, cap_lengths
from bert_unpad.nn.config import BertConfig
from bert_unpad.nn.flops import training_flops

if TYPE_CHECKING:
    from bert_unpad.pretrain.config import PretrainConfig

# The folder that scripts/mlperf_train.sh writes, and the model of MLPerf's rules.
_MLPERF_CHECKPOINT, _MLPERF_MODEL = "mlperf/checkpoint", "bert-large"
# Updates of a schedule that leaves out layers at random, of which the mean is taken.
_SAMPLES = 64


def read_recipe(path: str, overrides: list[str]) -> dict[str, Any]:
    """What a plan needs of a recipe, under the names of the options; `run` is its configuration.

    Raises:
        ValueError: it is no recipe, or what it asks for is not modelled; the message names the key.
    """
    from bert_unpad.nn.replaced_tokens import generator_config
    from bert_unpad.pretrain.config import ConfigError, read_config

    if not Path(path).is_file():
        raise ValueError(f"argument --model: expected a recipe, got {path!r}, which is no file")
    for override in overrides:
        if "=" not in override:
            raise ValueError(f"argument --set: expected KEY=VALUE, got {override!r}")
    run, _ = read_config(["--config", path, *(f"--{override}" for override in overrides)])
    run.model.preset = _known_preset(run.model.preset, Path(path))
    batching = run.batching
    strategy: str = batching.strategy
    if strategy == "exchange":
        ways = {"none": "random", "node": "exchange_node"}
        strategy = ways.get(batching.scope, "exchange")
    if strategy not in STRATEGIES:
        raise ValueError(
            f"{path}: expected batching.strategy stratified, random or exchange, got "
            f"{batching.strategy!r} (--set batching.strategy=stratified)"
        )
    vocabulary = run.data.vocab_size
    if run.data.vocab_file is not None:
        vocabulary = _lines(Path(run.data.vocab_file))
    elif not run.data.trains_tokenizer:
        vocabulary = _entries(Path(run.data.tokenizer))
    try:
        config = run.model.resolve(vocabulary, run.data)
    except ConfigError as error:
        if error.key != "model.preset":
            raise
        raise ValueError(
            f"{path}: {error} (--set model.preset=bert-large plans with that preset, --set "
            "model.preset=PATH with the sizes in another config.json)"
        ) from error
    found: dict[str, Any] = {
        "run": run,
        "config": config,
        "masked": float(np.mean(run.data.masked_lm_prob)),
        "max_length": run.data.max_seq_length,
        "precision": run.precision,
        "optimizer": run.optimizer.name,
        "strategy": strategy,
        "bucket_mb": run.comm.bucket_mb,
        "steps": run.schedule.total_steps,
        "epochs": run.schedule.epochs,
    }
    if run.data.objective == "rtd":
        found["generator"] = generator_config(config, run.model.generator_share)
    if batching.global_batch_size is not None:
        found["global_batch"] = batching.global_batch_size
    return found


def run_parts(run: PretrainConfig, whole: Workload) -> tuple[Part, ...]:
    """The parts of the run whose updates differ from its last ones: growth, and a growing batch.

    Args:
        run: the trainer's configuration.
        whole: the run with its full batch and model.

    Raises:
        ValueError: the schedule of growth does not fit the run.
    """
    parts = _growth_parts(run, whole)
    first, steps = run.batching.warmup_batch_size, run.batching.warmup_steps
    if first is None or steps is None or first >= whole.global_batch:
        return parts
    sizes = range(first, whole.global_batch, first)
    ends = [round(steps * (i + 1) / len(sizes)) for i in range(len(sizes))]
    found = [
        Part(end - begin, replace(whole, global_batch=size))
        for size, (begin, end) in zip(sizes, pairwise([0, *ends]), strict=True)
        if end > begin
    ]
    return (*parts, *found)


def _growth_parts(run: PretrainConfig, whole: Workload) -> tuple[Part, ...]:
    """Stages of `growth`, but for what trains as the whole run does."""
    from bert_unpad.pretrain.growth import Setting, make_growth

    if run.growth.name == "none":
        return ()
    layers = whole.config.num_hidden_layers
    growth = make_growth(run.growth, Setting(run.seed, whole.updates, layers, whole.longest))
    parts = []
    for begin, stage in zip((0, *(s.end for s in growth.stages)), growth.stages, strict=False):
        config = replace(whole.config, num_hidden_layers=stage.layers)
        work = replace(
            whole,
            config=config,
            counts=cap_lengths(whole.counts, stage.max_seq_length),
            updates=max(stage.end - begin, 1),
        )
        share = _trained(work, stage.frozen)
        if growth.active_layers is not None:
            steps = range(begin, stage.end, max((stage.end - begin) // _SAMPLES, 1))
            active = [[n for n, on in enumerate(growth.active_layers(s)) if on] for s in steps]
            share = sum(_trained(work, 0, one) for one in active) / len(active)
        if (work.config, work.longest, share) != (whole.config, whole.longest, 1.0):
            parts.append(Part(stage.end - begin, work, share))
    return tuple(parts)


def _trained(work: Workload, frozen: int, layers: list[int] | None = None) -> float:
    """Share of a pass's operations where lower layers run forward only, or only some layers run."""
    lengths = [round(work.mean_length)] * 64
    whole = training_flops(work.config, lengths)
    return training_flops(work.config, lengths, layers=layers, frozen_layers=frozen) / whole


def _known_preset(preset: str, path: Path) -> str:
    """The preset that has a model's sizes, where a run that is to begin from it is not here.

    A folder `RUN_DIR/model` is the model of the recipe beside this one with that run_dir.
    """
    if Path(preset).exists():
        return preset
    import yaml

    if preset == _MLPERF_CHECKPOINT:
        return _MLPERF_MODEL
    for other in sorted(path.parent.glob("*.yaml")):
        values = yaml.safe_load(other.read_text("utf-8")) or {}
        named = (values.get("model") or {}).get("preset", "bert-base")
        if values.get("run_dir") == str(Path(preset).parent) and named != preset:
            return _known_preset(named, path)
    return preset


def _lines(vocabulary: Path) -> int:
    """Tokens of a vocabulary; as many as BERT's where the file is on another machine."""
    if not vocabulary.is_file():
        return BertConfig.vocab_size
    return len(vocabulary.read_text("utf-8").splitlines())


def _entries(tokenizer: Path) -> int:
    """Tokens of a tokenizer.json; as many as BERT's where the file is on another machine."""
    from bert_unpad.data import JsonTokenizer

    return (
        JsonTokenizer.from_file(tokenizer).vocab_size
        if tokenizer.exists()
        else (BertConfig.vocab_size)
    )
