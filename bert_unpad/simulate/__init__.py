"""Simulates an epoch's distribution of work over ranks, without training anything.

As a command: `python -m bert_unpad.simulate --help`.
"""

from bert_unpad.simulate.epoch import STRATEGIES, SimulationResult, simulate

__all__ = ["STRATEGIES", "SimulationResult", "simulate"]
