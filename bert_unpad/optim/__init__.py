"""Optimizers: Adam, LAMB and LANS, fused into one pass over all parameters; Muon, MERIT, MT-DAO."""

from bert_unpad.optim.adam import FusedAdam
from bert_unpad.optim.groups import decay_groups, muon_groups
from bert_unpad.optim.lamb import FusedLAMB
from bert_unpad.optim.merit import MERIT
from bert_unpad.optim.mt_dao import MTDAO
from bert_unpad.optim.muon import Muon

__all__ = ["MERIT", "MTDAO", "FusedAdam", "FusedLAMB", "Muon", "decay_groups", "muon_groups"]
