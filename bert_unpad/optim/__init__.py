"""Optimizers: Adam, LAMB and LANS, fused into one pass over all parameters, and MT-DAO."""

from bert_unpad.optim.adam import FusedAdam
from bert_unpad.optim.groups import decay_groups
from bert_unpad.optim.lamb import FusedLAMB
from bert_unpad.optim.mt_dao import MTDAO

__all__ = ["MTDAO", "FusedAdam", "FusedLAMB", "decay_groups"]
