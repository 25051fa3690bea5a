"""Gradients between ranks: clipping before they are averaged, while the backward pass goes on."""

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
