"""Simulates how an epoch's work is dealt to ranks, and what its steps cost, without training.

As a command: `python -m bert_unpad.simulate --help`. The cost models are those of
`bert_unpad.costs`: `ComputeCost` (a rank's step, given, derived or fitted), `Cluster`, `Link` and
`Overlap` (communication), and `StepModel` (all of it).
"""

from bert_unpad.costs.compute import ComputeCost
from bert_unpad.costs.network import Cluster, Link
from bert_unpad.costs.overlap import Overlap
from bert_unpad.costs.step import StepModel, StepTime
from bert_unpad.simulate.epoch import STRATEGIES, Fill, SimulationResult, simulate
from bert_unpad.simulate.scaling import scaling_curve

__all__ = [
    "STRATEGIES",
    "Cluster",
    "ComputeCost",
    "Fill",
    "Link",
    "Overlap",
    "SimulationResult",
    "StepModel",
    "StepTime",
    "scaling_curve",
    "simulate",
]
