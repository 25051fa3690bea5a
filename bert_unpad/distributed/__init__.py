"""Averages of gradients or models over ranks: beside the backward pass, clipped, with less sent.

`ShardedOptimizer` also shares the update out.
"""

from bert_unpad.distributed.allreduce import (
    HierarchicalAllreduce,
    OptimizerAllreduce,
    allreduce_hook,
)
from bert_unpad.distributed.bucket_clip import BucketClip, ClipReport
from bert_unpad.distributed.bucket_shares import POLICIES
from bert_unpad.distributed.clip_before import ClipBefore
from bert_unpad.distributed.one_bit import OneBitAllreduce
from bert_unpad.distributed.sharded_clip import ShardedClip
from bert_unpad.distributed.sharded_optimizer import ShardedOptimizer

__all__ = [
    "POLICIES",
    "BucketClip",
    "ClipBefore",
    "ClipReport",
    "HierarchicalAllreduce",
    "OneBitAllreduce",
    "OptimizerAllreduce",
    "ShardedClip",
    "ShardedOptimizer",
    "allreduce_hook",
]
