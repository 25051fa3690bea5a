"""What the options mean: a workload, a device, a cluster, what may be used."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from bert_unpad.costs.cards import find_card
from bert_unpad.costs.device import Device, card_device, mixed_device
from bert_unpad.costs.inputs import model_config, read_counts
from bert_unpad.costs.links import intra_node_link, network_link
from bert_unpad.costs.network import Cluster, Link
from bert_unpad.costs.workload import OPTIMIZERS, STRATEGIES, Workload, cap_lengths
from bert_unpad.nn.config import BertConfig
from bert_unpad.plan.candidates import Allowed


def workload_of(options: argparse.Namespace) -> tuple[Workload, float | None]:
    """The workload, and the limit of DDP's buckets in MiB if one is given.

    An option goes before the recipe, and that before the default.

    Raises:
        OSError, ValueError: a file cannot be read or is none; the message names the option.
    """
    recipe: dict[str, Any] = {}
    if options.model.endswith((".yaml", ".yml")):
        recipe = _recipe(options.model, options.set)
    elif options.set:
        raise ValueError("argument --set: expected --model to be a recipe (YAML)")
    config = recipe.get("config") or _config(options.model)

    def given(name: str, default: Any) -> Any:
        value = getattr(options, name)
        return recipe.get(name, default) if value is None else value

    longest = given("max_length", config.max_length)
    if longest > config.max_length:
        raise ValueError(
            f"argument --max-length: expected at most {config.max_length}, the "
            f"model's positions, got {longest}"
        )
    counts = cap_lengths(read_counts(options.data, "--data"), longest)
    global_batch = given("global_batch", 256)
    steps, epochs = options.steps, options.epochs
    if steps is None and epochs is None:
        steps, epochs = recipe.get("steps"), recipe.get("epochs")
    if steps is None:
        examples = options.examples or int(counts.sum())
        if options.tokens is not None:
            mean = float(counts @ np.arange(len(counts))) / float(counts.sum())
            examples = options.tokens / mean
        steps = max(math.ceil((1 if epochs is None else epochs) * examples / global_batch), 1)
    elif options.examples is not None or options.tokens is not None:
        name = "--examples" if options.examples is not None else "--tokens"
        raise ValueError(f"argument {name}: expected with --epochs, not where steps are given")
    optimizer = given("optimizer", "adamw")
    if optimizer not in OPTIMIZERS:
        raise ValueError(
            f"{options.model}: expected optimizer.name of one of {', '.join(OPTIMIZERS)}, whose "
            f"time and memory are modelled, got {optimizer!r} (--optimizer plans with another)"
        )
    workload = Workload(
        config=config,
        counts=counts,
        global_batch=global_batch,
        updates=steps,
        precision=given("precision", "bf16"),
        optimizer=optimizer,
        strategy=given("strategy", "stratified"),
    )
    return workload, given("bucket_mb", None)


def hardware_of(
    options: argparse.Namespace, workload: Workload
) -> tuple[Device, Cluster, float | None, list[str]]:
    """The device of a rank, the cluster, the price of a card per hour, and what they rest on.

    Raises:
        ValueError: an option is out of range; the message names it.
    """
    basis = []
    measured: Link | None = None
    price = options.price
    # Links before the device: a wrong name must be found before a calibration, not after it.
    node = intra_node_link(options.intra_node or "pcie")
    network = network_link(
        options.network,
        options.gpus_per_node,
        adapters=options.adapters,
        latency=None if options.latency is None else options.latency * 1e-6,
    )
    if options.calibrate is not None:
        # Needs the trainer's own packages, which a plan does without otherwise.
        from bert_unpad.plan.calibrate import calibrate

        found = calibrate(
            workload,
            device=options.device,
            seconds=options.calibrate,
            memory_share=options.memory_share,
        )
        device, measured = found.device, found.link
        cost, per_token = device.passes, workload.mean_square / workload.mean_length
        basis.append(
            f"measured on {device.name}: a pass takes {cost.fixed * 1e3:.3g} ms and "
            f"{1e6 * (cost.linear + cost.quadratic * per_token):.3g} us a token, an "
            f"update {1e3 * (device.clip + device.update):.3g} ms"
        )
        if price is None:
            basis.append("no price was given, so costs are left out (--price)")
    else:
        cards = [find_card(name) for name in options.card.split(",")]
        device = mixed_device(
            [
                card_device(
                    card, workload, sustained=options.sustained, memory_share=options.memory_share
                )
                for card in cards
            ]
        )
        if options.intra_node is None and all(card.nvlink for card in cards):
            node = intra_node_link("nvlink")
        peaks = [f"{card.peak(workload.precision) / 1e12:g}" for card in cards]
        basis.append(
            f"assumed: passes reach {options.sustained:.0%} of the card's peak of "
            f"{' and '.join(peaks)} TFLOP/s in {workload.precision}; "
            "nothing was measured (--sustained, --calibrate)"
        )
        if len(cards) > 1:
            basis.append(
                "equal parts of the ranks have each card, and work in proportion to its speed "
                "(train with --batching.rank_speeds=auto)"
            )
        if price is None:
            price = sum(card.price for card in cards) / len(cards)
            basis.append(
                f"assumed: a card costs {price:g} US dollars an hour, "
                "a round figure of 2025 (--price)"
            )
    if measured is not None:
        rate = f"{measured.bandwidth / 1e9:.3g} GB/s and {measured.latency * 1e6:.3g} us a message"
        if _is_one_host():
            node = measured
            basis.append(f"measured between ranks of a node: {rate}")
        else:
            # One ring through all ranks passes the link of each node once: its rate is the node's,
            # of which a rank has its share in a hierarchical allreduce.
            network = Link(measured.latency, measured.bandwidth / options.gpus_per_node)
            basis.append(f"measured between nodes: {rate}")
    on_cpus = options.calibrate is not None and options.device == "cpu"
    cluster = Cluster(options.gpus_per_node, node, network, flat=on_cpus)
    return device, cluster, price, basis


def allowed_of(options: argparse.Namespace) -> Allowed:
    """The settings that may be used."""
    return Allowed(
        compressions=options.compression,
        shards=options.shard,
        recompute=options.recompute,
        local_sgd_periods=(1,) if options.local_sgd == 1 else (1, options.local_sgd),
    )


def _config(name: str) -> BertConfig:
    try:
        return model_config({"base": "bert-base", "large": "bert-large"}.get(name, name))
    except ValueError as error:
        if Path(name).is_file():
            raise
        raise ValueError(
            "argument --model: expected base, large, a config.json or a recipe (YAML), "
            f"got {name!r}"
        ) from error


def _recipe(path: str, overrides: list[str]) -> dict[str, Any]:
    """What a plan needs of a recipe, under the names of the options."""
    from bert_unpad.pretrain.config import ConfigError, read_config

    if not Path(path).is_file():
        raise ValueError(f"argument --model: expected a recipe, got {path!r}, which is no file")
    for override in overrides:
        if "=" not in override:
            raise ValueError(f"argument --set: expected KEY=VALUE, got {override!r}")
    run, _ = read_config(["--config", path, *(f"--{override}" for override in overrides)])
    batching = run.batching
    if batching.strategy not in STRATEGIES:
        raise ValueError(
            f"{path}: expected batching.strategy stratified or random, got {batching.strategy!r} "
            "(--set batching.strategy=stratified)"
        )
    if batching.warmup_batch_size is not None:
        raise ValueError(
            f"{path}: expected batching.warmup_batch_size null, since a plan has one batch size, "
            f"got {batching.warmup_batch_size} (--set batching.warmup_batch_size=null "
            "--set batching.warmup_steps=null)"
        )
    if run.data.objective == "rtd":
        raise ValueError(
            f"{path}: expected data.objective mlm_nsp, mlm or mlm_sop, since a plan has one "
            "encoder, got rtd (--set data.objective=mlm)"
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
        "config": config,
        "max_length": run.data.max_seq_length,
        "precision": run.precision,
        "optimizer": run.optimizer.name,
        "strategy": batching.strategy,
        "bucket_mb": run.comm.bucket_mb,
        "steps": run.schedule.total_steps,
        "epochs": run.schedule.epochs,
    }
    if batching.global_batch_size is not None:
        found["global_batch"] = batching.global_batch_size
    return found


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


def _is_one_host() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
