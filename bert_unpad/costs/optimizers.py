"""What an update costs for each parameter, by optimizer."""

from __future__ import annotations

from typing import NamedTuple

import torch

from bert_unpad.nn import Encoder, EncoderConfig


class OptimizerCost(NamedTuple):
    """Bytes for each parameter."""

    state: int
    """What the optimizer keeps between updates."""
    traffic: int
    """What an update reads and writes."""


# Traffic: gradient, parameter and two moments are read, the last three written; LAMB,
# LANS and StableAdamW read what they have written once more, after sums over it. MT-DAO has a
# moment more. One-bit optimizers keep a momentum, a variance and errors of two sides, the second a
# rank's part; an update fills the buffer that travels and reads it back. Muon: of its matrices one
# moment, of the rest two; what it multiplies is `muon_flops`.
OPTIMIZER_COSTS: dict[str, OptimizerCost] = {
    "adamw": OptimizerCost(8, 28),
    "fused_adam": OptimizerCost(8, 28),
    "lamb": OptimizerCost(8, 40),
    "lans": OptimizerCost(8, 40),
    "stable_adamw": OptimizerCost(8, 40),
    "muon": OptimizerCost(8, 28),
    "mt_dao": OptimizerCost(12, 36),
    "onebit_adam": OptimizerCost(12, 40),
    "onebit_lamb": OptimizerCost(12, 52),
    "zero_one_adam": OptimizerCost(12, 40),
}
"""Costs of the values of `optimizer.name`; the two moments of Adam are 8 bytes."""

_NEWTON_SCHULZ_STEPS = 5


def muon_flops(config: EncoderConfig) -> float:
    """Operations of an update's orthogonalisation of the encoder's matrices, on one rank.

    Each of five steps multiplies an m x n matrix, m <= n, three times: 2 m m n twice, 2 m m m once.
    """
    with torch.device("meta"):
        layers = Encoder(config).layer
    shapes = [tuple(p.shape) for p in layers.parameters() if p.ndim == 2]
    short = [(min(shape), max(shape)) for shape in shapes]
    return float(sum(_NEWTON_SCHULZ_STEPS * 2 * m * m * (2 * n + m) for m, n in short))
