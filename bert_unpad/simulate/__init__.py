"""Simulates an epoch's distribution of work over ranks, and what its steps cost, without training.

As a command: `python -m bert_unpad.simulate --help`. The cost models stand alone: `ComputeCost`
(a rank's step, given, derived or fitted), `Cluster`, `Link` and `Overlap` (communication), and
`StepModel` (all of it).
"""

from bert_unpad.costs.compute import ComputeCost
from bert_unpad.costs.network import Cluster, Link, Overlap
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
