"""What an update costs for each parameter, by optimizer."""

from __future__ import annotations

from typing import NamedTuple


class OptimizerCost(NamedTuple):
    """Bytes for each parameter."""

    state: int
    """What the optimizer keeps between updates."""
    traffic: int
    """What an update reads and writes."""


# Traffic: gradient, parameter and two moments are read, the last three written; LAMB,
# LANS and StableAdamW read what they have written once more, after sums over it.
OPTIMIZER_COSTS: dict[str, OptimizerCost] = {
    "adamw": OptimizerCost(8, 28),
    "fused_adam": OptimizerCost(8, 28),
    "lamb": OptimizerCost(8, 40),
    "lans": OptimizerCost(8, 40),
    "stable_adamw": OptimizerCost(8, 40),
}
"""Costs of those values of `optimizer.name` that are modelled."""
