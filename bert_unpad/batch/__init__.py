"""Batches without padding.

`VarlenBatch` describes how sequences are packed. `unpad` and `pad` convert between the padded
[B, S, ...] and the packed [T, ...] layout. `PackedInputs` is one packed pretraining batch.
"""

from bert_unpad.batch.inputs import PackedInputs, QueryRows
from bert_unpad.batch.rows import pad, unpad
from bert_unpad.batch.varlen import LengthGroup, VarlenBatch

__all__ = ["LengthGroup", "PackedInputs", "QueryRows", "VarlenBatch", "pad", "unpad"]
