"""Training steps of ModernBERT and ESM-2 on packed sequences of one length, added up from models.

The same sum as benchmarks/cuda_step.py's, whose page is BERT-large's. Kernels that memory limits
are counted as the planner counts them (bert_unpad/costs/kernels.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.lib.gpu_rates import RANGES
from benchmarks.lib.report import between, commands, table
from benchmarks.lib.step_parts import PRODUCT_RATE, PRODUCTS, Part, memory, sum_at
from bert_unpad.costs.gradient_buckets import num_parameters
from bert_unpad.costs.kernels import layer_numbers
from bert_unpad.nn import PRESETS, EncoderConfig
from bert_unpad.nn.flops import attention_flops, training_flops

TOKENS = 32_768  # of a step, as in benchmarks/packed_tokens.py
# Kernels of a layer, forward and backward, and of all else, without products and attention: what
# costs/kernels.py takes from an H100's profile, less 4 products in 3 passes and 3 of attention.
LAYER_KERNELS, OTHER_KERNELS = 32 - 12 - 3, 60 - 6


class Encoder(NamedTuple):
    name: str
    config: EncoderConfig
    masked: float
    """The share of the tokens that are predicted."""
    published: dict[int, float]
    """Tokens/s and GPU of an H100, by the length of sequences."""


def _esm2_650m() -> EncoderConfig:
    sizes = {"num_hidden_layers": 33, "hidden_size": 1280, "num_attention_heads": 20}
    return EncoderConfig(**PRESETS["esm2-8m"] | sizes | {"intermediate_size": 5120})


# See HEAD for where these are published.
ENCODERS = (
    Encoder(
        *("ModernBERT-base", EncoderConfig(**PRESETS["modernbert-base"]), 0.3),
        {1024: 312e3, 8192: 239e3},
    ),
    Encoder(
        *("ModernBERT-large", EncoderConfig(**PRESETS["modernbert-large"]), 0.3),
        {1024: 142e3, 8192: 116e3},
    ),
    Encoder("ESM-2 650M", _esm2_650m(), 0.15, {1024: 96e3}),
)


class Attention(NamedTuple):
    """What attention's times depend on in a step of TOKENS."""

    heads: int
    length: int
    window: int


def attention_of(encoder: Encoder, length: int) -> Counter[Attention]:
    """How many layers have each."""
    config = encoder.config
    layers = range(config.num_hidden_layers)
    return Counter(Attention(config.num_attention_heads, length, config.window(i)) for i in layers)


def all_attention() -> list[Attention]:
    found = [attention_of(x, length) for x in ENCODERS for length in x.published]
    return sorted(set().union(*found))


def parts(encoder: Encoder, length: int, record: list[dict[str, Any]]) -> Iterator[Part]:
    """The parts of a step; `record`: what attention takes."""
    config, lengths = encoder.config, [length] * (TOKENS // length)
    layers, hidden, vocab = config.num_hidden_layers, config.hidden_size, config.vocab_size
    masked = round(encoder.masked * TOKENS)
    operations = training_flops(config, lengths, masked) - attention_flops(config, lengths)
    why = f"{operations / 1e12:.1f} TFLOP"
    yield Part(PRODUCTS, 3 * (4 * layers + 2), operations / PRODUCT_RATE, why)
    for kind, count in sorted(attention_of(encoder, length).items()):
        (row,) = (x for x in record if Attention(*(x[n] for n in Attention._fields)) == kind)
        of = "all keys" if kind.window < 0 else f"{kind.window} keys on each side"
        for name in ("forward", "backward"):
            seconds = row[f"{name}_seconds"]
            why = f"{count} times {1e6 * seconds:.0f} us with launches"
            yield Part(f"attention, {of}, {name}", 0, count * seconds, why)
    attended = 12 * config.num_attention_heads * config.head_dim  # attention's own
    yield memory(
        "norms, activations, rotation",
        LAYER_KERNELS * layers,
        2 * TOKENS * layers * (layer_numbers(config) - attended),
        "each reads and writes once",
    )
    yield memory(
        "embeddings, masked tokens",
        OTHER_KERNELS,
        (6 + 10) * TOKENS * hidden + 4 * vocab * hidden + masked * (6 * vocab + 22 * hidden),
        "rows and their gradients; logits read twice, their gradient written",
    )
    weights = num_parameters(config)
    yield memory(
        "gradients' norm, Adam",
        6,
        (4 + 28 + 2) * weights,
        "reads weights, gradients, two moments; writes weights (also in bf16) and moments",
    )


HEAD = """\
# Steps of ModernBERT and ESM-2 by models

**Modelled.** A training step of {tokens:,} tokens in packed sequences of one length with CUDA \
graphs: bf16, no dropout, Adam; ModernBERT predicts 30% of the tokens, ESM-2 15%. The sum is made \
like [BERT-large's](cuda-step.md): attention by the [model of an SM](cuda-model.md) (wgmma; one \
kernel forward, two backward for these lengths), other kernels by the bytes that the \
[planner](../capacity/planning.md) counts, products by an assumed rate, and the last layer whole. \
All constants at a slow and at a fast end: those of that page. Written by

{command}

{table}

Published: ModernBERT's authors, 1.7 trillion tokens on 8 H100 (Warner et al., 2024, \
arXiv:2412.13663, table 3: tokens by time and GPU), and NVIDIA's charts of BioNeMo 2 on an H100, \
where padding counts as tokens. Both have data and communication, which the sum leaves out. \
Measured, and ModernBERT-base alone (each within its range): packed_tokens.json of \
[an H100](../../benchmarks/results/nvidia-h100-80gb-hbm3/packed_tokens.json) and \
[an H200](../../benchmarks/results/nvidia-h200/packed_tokens.json).
"""


def render(record: list[dict[str, Any]], measured: dict[str, dict[int, float]]) -> str:
    """The page; `measured`: tokens/s of ModernBERT-base by GPU and length."""
    rows, details = [], []
    for encoder in ENCODERS:
        for length, published in encoder.published.items():
            counted = list(parts(encoder, length, record))
            for gpu, ends in RANGES.items():
                times = [sum_at(end, counted) for end in ends]
                seen = measured.get(gpu, {}).get(length) if encoder is ENCODERS[0] else None
                rows.append(
                    [
                        *(encoder.name, f"{length:,}", gpu),
                        between([1e3 * x for x in times], 1),
                        f"**{between([TOKENS / x / 1e3 for x in times], 0)}**",
                        f"{published / 1e3:.0f}" if gpu == "H100" else "-",
                        "-" if seen is None else f"{seen / 1e3:.0f}",
                    ]
                )
            ends = RANGES["H100"]
            lines = [
                [x.name, x.why, str(x.launches), between([1e3 * x.at(end) for end in ends], 1)]
                for x in counted
            ]
            columns = ["part, on an H100", "what is counted", "launches", "ms"]
            details.append(f"## {encoder.name}, {length:,} tokens a sequence\n")
            details.append(table(columns, lines, 2) + "\n")
    columns = ["model", "length", "GPU", "ms a step", "thousand tokens/s"]
    columns += ["published, H100", "measured"]
    page = "docs/development/encoder-steps.md"
    head = HEAD.format(
        tokens=TOKENS,
        command=commands(f"python -m benchmarks.cuda_step --encoders {page}"),
        table=table(columns, rows, 3),
    )
    return "\n".join([head, *details])
