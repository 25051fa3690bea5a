"""Optimizers: Adam, LAMB, LANS, StableAdamW and Muon, fused; those that send less."""

from bert_unpad.optim.adam import FusedAdam
from bert_unpad.optim.groups import decay_groups, muon_groups
from bert_unpad.optim.lamb import FusedLAMB
from bert_unpad.optim.muon import Muon
from bert_unpad.optim.one_bit_adam import OneBitAdam
from bert_unpad.optim.one_bit_lamb import OneBitLAMB
from bert_unpad.optim.stable_adamw import FusedStableAdamW

__all__ = [
    "FusedAdam",
    "FusedLAMB",
    "FusedStableAdamW",
    "Muon",
    "OneBitAdam",
    "OneBitLAMB",
    "decay_groups",
    "muon_groups",
]
