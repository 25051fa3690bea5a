"""What an update costs for each parameter, by optimizer."""

from typing import NamedTuple

import torch

from bert_unpad.nn import Encoder, EncoderConfig


class OptimizerCost(NamedTuple):
    """What an optimizer costs for each parameter."""

    state: int
    """Bytes that the optimizer keeps between updates."""
    traffic: int
    """Bytes that an update reads and writes."""
    averaged: int = 0
    """Numbers that ranks average between updates of their own; 0: they average gradients."""


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
    "mt_dao": OptimizerCost(12, 36, averaged=4),
    "onebit_adam": OptimizerCost(12, 40),
    "onebit_lamb": OptimizerCost(12, 52),
    "zero_one_adam": OptimizerCost(12, 40),
}
"""Costs of the values of `optimizer.name`; the two moments of Adam are 8 bytes."""

APART_PERIOD = 32
"""Updates between the averages of optimizers whose ranks make updates of their own."""

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
