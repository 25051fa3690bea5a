"""Optimizers: Adam, LAMB, LANS and Muon, fused; MERIT; and those that send less between ranks."""

from bert_unpad.optim.adam import FusedAdam
from bert_unpad.optim.groups import decay_groups, muon_groups
from bert_unpad.optim.lamb import FusedLAMB
from bert_unpad.optim.merit import MERIT
from bert_unpad.optim.mt_dao import MTDAO
from bert_unpad.optim.muon import Muon
from bert_unpad.optim.one_bit_adam import OneBitAdam
from bert_unpad.optim.one_bit_lamb import OneBitLAMB
from bert_unpad.optim.zero_one_adam import ZeroOneAdam

__all__ = [
    "MERIT",
    "MTDAO",
    "FusedAdam",
    "FusedLAMB",
    "Muon",
    "OneBitAdam",
    "OneBitLAMB",
    "ZeroOneAdam",
    "decay_groups",
    "muon_groups",
]
