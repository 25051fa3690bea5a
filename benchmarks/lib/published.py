"""Published training runs as data, this package's own measurements, and what a plan predicts of
them.

`published_runs.json` has a row for each run: where it is published (`source`), what that says
(`says`), and its configuration. Batches are sequences of a pass on one GPU. `lengths` is a length,
`wikipedia` (without padding, or with sequences packed), or `wikipedia_64` (padded to multiples of
64). `kernels` says how the software computes: `fused`, as this package does; `scores`, with
attention's scores in memory; `eager`, with each pointwise operation a kernel of its own as well.
`assumed` names what of a configuration the source does not say. Twice the passes would move a
prediction by less than 12 %, most by less than 5 %. MLPerf's runs are taken to share the update
out, which matters where batches are small.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.lib.report import folder
from bert_unpad.costs import kernels
from bert_unpad.costs.cards import CARDS
from bert_unpad.costs.compute import ComputeCost
from bert_unpad.costs.device import card_device
from bert_unpad.costs.links import card_link, gpu_cluster, network_link
from bert_unpad.costs.workload import Workload
from bert_unpad.data.sampling.histogram import wikipedia_lengths
from bert_unpad.nn.config import PRESETS, EncoderConfig
from bert_unpad.nn.flops import MASKED_FRACTION
from bert_unpad.plan.candidates import Candidate
from bert_unpad.plan.planner import Planner

Run = dict[str, Any]

RUNS: list[Run] = json.loads(Path(__file__).with_name("published_runs.json").read_text())

# Bytes that attention moves for each score that lies in memory, in 16 bits. Forward: scores are
# written, and read and written by softmax and by dropout, and read once more. Backward: the
# gradient is written, read and written by dropout, read with the weights and written by softmax,
# read by two products; the weights are read once more. Two masks of a byte.
_SCORE_BYTES = 2 * (1 + 2 + 2 + 1) + 2 * (1 + 2 + 3 + 2 + 1) + 2
# Numbers of a token and layer that separate kernels read or write beyond the fused ones, as
# multiples of the hidden size H with a feed-forward of 4 H: biases of four products, two dropouts
# and two residuals, once forward and one and a half times backward.
_EAGER_NUMBERS = (2 * (3 + 1 + 4 + 1) + 2 * 2 + 2 * 3) * 2.5


def config_of(run: Run) -> EncoderConfig:
    """The run's model: a preset, or one with other sizes."""
    model = run["model"]
    if isinstance(model, str):
        return EncoderConfig(**PRESETS[model])
    sizes = {name: value for name, value in model.items() if name != "preset"}
    return EncoderConfig(**(PRESETS[model["preset"]] | sizes))


def lengths_of(run: Run) -> NDArray[np.int64]:
    """The histogram of the run's sequences, with the padding that it computes."""
    lengths = run["lengths"]
    if isinstance(lengths, int):
        counts = np.zeros(lengths + 1, np.int64)
        counts[lengths] = 1
        return counts
    counts = wikipedia_lengths()
    if lengths == "wikipedia":
        return counts
    padded = np.zeros_like(counts)
    np.add.at(padded, -(-np.arange(len(counts)) // 64) * 64, counts)
    return padded


def predict(run: Run) -> float:
    """Sequences a second that a plan predicts for a published run."""
    config, card = config_of(run), CARDS[run["card"]]
    gpus, per_node = run["gpus"], run["gpus_per_node"]
    work = Workload(
        config,
        lengths_of(run),
        global_batch=round(run["batch"] * run["accumulation"] * gpus),
        updates=1,
        precision=run["precision"],
        optimizer=run["optimizer"],
        masked=run.get("masked", MASKED_FRACTION),
    )
    device = card_device(card, work)
    bandwidth = kernels.RATES.streamed * card.bandwidth_gbs * 1e9
    layers, cost = len(config.layer_order), device.passes
    linear, quadratic = cost.linear, cost.quadratic
    if run["kernels"] != "fused":
        quadratic += layers * config.num_attention_heads * _SCORE_BYTES / bandwidth
    if run["kernels"] == "eager":
        linear += layers * 2 * _EAGER_NUMBERS * config.hidden_size / bandwidth
    device = replace(device, passes=ComputeCost(linear, quadratic, cost.fixed))
    network = network_link(run["network"], per_node, adapters=run["adapters"])
    planner = Planner(work, device, gpu_cluster(per_node, card_link(card), network))
    candidate = Candidate(
        nodes=gpus // per_node,
        batch=max(round(run["batch"]), 1),
        accumulation=run["accumulation"],
        compression="bf16" if gpus > 1 else "none",
        shard=run["shard"] if gpus > 1 else "none",
    )
    return planner.update_time(candidate).sequences_per_second


def measured_here() -> list[dict[str, Any]]:
    """This package's own steps on one GPU: configuration, measured and predicted seconds."""
    found = []
    for device, card, name in (
        ("nvidia-h100-80gb-hbm3", "h100", "model_ours"),
        ("nvidia-h200", "h200", "model"),
    ):
        result = _read(device, name)
        seconds = {row["contender"]: row["seconds"] for row in result["results"]}
        for precision, contender in (
            ("bf16", "bert_unpad, graphs"),
            ("fp8", "bert_unpad, fp8, delayed, graphs"),
        ):
            config = EncoderConfig(**PRESETS["bert-large"])
            predicted = _step_seconds(config, card, precision, result["lengths"], MASKED_FRACTION)
            about = f"BERT-large, {len(result['lengths'])} sequences, {precision}"
            found.append(_row(about, card, f"{device}/{name}", seconds[contender], predicted))
        for row in _read(device, "packed_tokens")["results"]:
            if row["contender"] != "bert_unpad":
                continue
            config = EncoderConfig(**PRESETS["modernbert-base"])
            lengths = [row["length"]] * (row["tokens"] // row["length"])
            predicted = _step_seconds(config, card, "bf16", lengths, 0.3)
            about = f"ModernBERT-base, {row['tokens']:,} tokens, length {row['length']:,}"
            found.append(_row(about, card, f"{device}/packed_tokens", row["seconds"], predicted))
    return found


def _step_seconds(
    config: EncoderConfig, card: str, precision: str, lengths: list[int], masked: float
) -> float:
    counts = np.bincount(lengths)
    work = Workload(config, counts, len(lengths), 1, precision, "fused_adam", masked=masked)
    device = card_device(CARDS[card], work)
    return device.passes.seconds(lengths) + device.update


def _row(about: str, card: str, file: str, measured: float, predicted: float) -> dict[str, Any]:
    return {
        "name": f"{about}, {card}",
        "source": f"benchmarks/results/{file}.json",
        "measured": measured,
        "predicted": predicted,
        "error": measured / predicted - 1,  # of the throughput, as for published runs
    }


def _read(device: str, name: str) -> dict[str, Any]:
    return json.loads((folder(device) / f"{name}.json").read_text())
