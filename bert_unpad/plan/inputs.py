"""What the options mean: a workload, a device, a cluster, what may be used."""

import argparse
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bert_unpad._choices import ONE_BIT
from bert_unpad.costs.cards import find_card
from bert_unpad.costs.device import Device, card_device, mixed_device
from bert_unpad.costs.error_band import error_sentence
from bert_unpad.costs.inputs import model_config, read_counts
from bert_unpad.costs.links import card_link, gpu_cluster, intra_node_link, network_link
from bert_unpad.costs.network import Cluster, Link
from bert_unpad.costs.workload import OPTIMIZERS, Workload, cap_lengths
from bert_unpad.nn.config import BertConfig
from bert_unpad.nn.flops import MASKED_FRACTION
from bert_unpad.plan.candidates import Allowed
from bert_unpad.plan.recipe import read_recipe, run_parts


def workload_of(options: argparse.Namespace) -> tuple[Workload, float | None]:
    """The workload, and the limit of DDP's buckets in MiB if one is given.

    An option goes before the recipe, and that before the default.

    Raises:
        OSError, ValueError: a file cannot be read or is none; the message names the option.
    """
    recipe: dict[str, Any] = {}
    if options.model.endswith((".yaml", ".yml")):
        recipe = read_recipe(options.model, options.set)
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
        masked=recipe.get("masked", MASKED_FRACTION),
        generator=recipe.get("generator"),
    )
    if "run" in recipe:
        workload = replace(workload, parts=run_parts(recipe["run"], workload))
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
        if workload.generator is not None:
            raise ValueError(
                "argument --calibrate: expected a recipe whose data.objective is not rtd, since "
                "one encoder is measured, got rtd (--card plans with it)"
            )
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
        if workload.optimizer in ONE_BIT:
            basis.append("compressing to one bit was not measured, and counts as no time")
        if price is None:
            basis.append("no price was given, so costs are left out (--price)")
    else:
        cards = [find_card(name) for name in options.card.split(",")]
        device = mixed_device(
            [
                card_device(
                    card,
                    workload,
                    products_share=options.products_share,
                    memory_share=options.memory_share,
                )
                for card in cards
            ]
        )
        if options.intra_node is None:
            node = min((card_link(card) for card in cards), key=lambda link: link.bandwidth)
        shares = [
            card.products_share(workload.precision)
            if options.products_share is None
            else options.products_share
            for card in cards
        ]
        peaks = [
            f"{share:.0%} of {card.peak(workload.precision) / 1e12:g}"
            for share, card in zip(shares, cards, strict=True)
        ]
        basis.append(
            f"modelled: products reach {' and '.join(peaks)} TFLOP/s, the peak in "
            f"{workload.precision}; passes run from CUDA graphs (--products-share, --calibrate)"
        )
        basis.append(error_sentence())
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
    if on_cpus:
        cluster = Cluster(options.gpus_per_node, node, network, flat=True)
    else:
        cluster = gpu_cluster(options.gpus_per_node, node, network)
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


def _is_one_host() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
