"""Averaging gradients over ranks, clipped before the average while the backward pass still runs."""

from bert_unpad.distributed.allreduce import HierarchicalAllreduce
from bert_unpad.distributed.bucket_clip import BucketClip, ClipReport
from bert_unpad.distributed.bucket_shares import POLICIES
from bert_unpad.distributed.clip_before import ClipBefore
from bert_unpad.distributed.sharded_clip import ShardedClip

__all__ = [
    "POLICIES",
    "BucketClip",
    "ClipBefore",
    "ClipReport",
    "HierarchicalAllreduce",
    "ShardedClip",
]
