"""Optimizers that update all parameters in one pass: Adam, LAMB and LANS."""

from bert_unpad.optim.adam import FusedAdam
from bert_unpad.optim.groups import decay_groups
from bert_unpad.optim.lamb import FusedLAMB

__all__ = ["FusedAdam", "FusedLAMB", "decay_groups"]
