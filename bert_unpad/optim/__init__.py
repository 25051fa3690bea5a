"""Optimizers: Adam, LAMB, LANS and StableAdamW, fused over all parameters; Muon, MERIT, MT-DAO."""

from bert_unpad.optim.adam import FusedAdam
from bert_unpad.optim.groups import decay_groups, muon_groups
from bert_unpad.optim.lamb import FusedLAMB
from bert_unpad.optim.merit import MERIT
from bert_unpad.optim.mt_dao import MTDAO
from bert_unpad.optim.muon import Muon
from bert_unpad.optim.stable_adamw import FusedStableAdamW

__all__ = [
    "MERIT",
    "MTDAO",
    "FusedAdam",
    "FusedLAMB",
    "FusedStableAdamW",
    "Muon",
    "decay_groups",
    "muon_groups",
]
