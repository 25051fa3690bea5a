"""Gradients, DDP's buckets, what travels of them, and what the backward pass hides."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bert_unpad.costs.gradient_buckets import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    fill_buckets,
    gradients_of,
    num_parameters,
)
from bert_unpad.costs.network import Cluster, Link
from bert_unpad.costs.overlap import BucketOverlap, Overlap, SyncBucket, exposed_seconds
from bert_unpad.costs.sync import COMPRESSIONS, power_sgd_bytes, sync_buckets
from bert_unpad.nn import BertConfig, BertForPreTraining, EncoderConfig, EncoderForPreTraining
from bert_unpad.nn.config import PRESETS
from tests.support.cost_models import TINY
from tests.support.seeds import derived

BASE = BertConfig(**PRESETS["bert-base"])


def test_number_of_parameters():
    assert num_parameters(TINY) == sum(p.numel() for p in BertForPreTraining(TINY).parameters())
    assert num_parameters(BertConfig(**PRESETS["bert-large"])) == pytest.approx(336e6, rel=0.01)


def test_gradients_are_those_of_the_model_and_buckets_those_of_ddp():
    found = gradients_of(TINY, 0.25)
    with torch.device("meta"):
        model = BertForPreTraining(TINY)
    assert sorted(g.shape for g in found) == sorted(tuple(p.shape) for p in model.parameters())
    ready = [gradient.ready for gradient in found]
    assert ready == sorted(ready)
    assert ready[-1] == 1 == found[-5].ready
    shapes = gradients_of(BASE, 0.1)
    tensors = [torch.empty(gradient.shape) for gradient in shapes]
    for limits in ((FIRST_BUCKET_BYTES, BUCKET_BYTES), (2**22, 2**22)):
        indices, _ = dist._compute_bucket_assignment_by_size(tensors, list(limits))
        ours = fill_buckets(shapes, limits[1], limits[0])
        assert [len(bucket.gradients) for bucket in ours] == [len(part) for part in indices]
        assert sum(bucket.numel for bucket in ours) == sum(t.numel() for t in tensors)


@pytest.mark.parametrize("name", PRESETS)
def test_gradients_of_every_family(name):
    config = EncoderConfig(**PRESETS[name])
    found = gradients_of(config, 0.1)
    with torch.device("meta"):
        model = EncoderForPreTraining(config)
    assert sorted(g.shape for g in found) == sorted(tuple(p.shape) for p in model.parameters())
    ready = [gradient.ready for gradient in found]
    assert ready == sorted(ready)
    if config.num_hidden_groups == 1:  # shared weights are complete after their last use
        layer = model.bert.encoder.layer[0].attention.self.qkv.weight.shape
        assert min(g.ready for g in found if g.shape == layer) > 1 - 0.9 / 12


def test_power_sgd_sends_thin_matrices():
    shapes = gradients_of(BASE, 0.1)
    whole, ps, qs = power_sgd_bytes(shapes)
    matrices = [g.shape for g in shapes if len(g.shape) == 2 and min(g.shape) > 2]
    assert ps == 4 * 2 * sum(rows for rows, _ in matrices)
    assert qs == 4 * 2 * sum(columns for _, columns in matrices)
    # The token types' two rows are no smaller as a product.
    assert whole == 4 * sum(g.numel for g in shapes if g.shape not in matrices)
    buckets = fill_buckets(shapes)
    sent = {
        name: sum(sum(bucket.sizes) for bucket in sync_buckets(buckets, name))
        for name in COMPRESSIONS
    }
    assert sent["power_sgd"] == whole + ps + qs
    assert sent["none"] == 2 * sent["bf16"]


@pytest.mark.parametrize("compute", [0.0, 0.01, 0.3, 1.0, 5.0])
def test_overlap_is_that_of_buckets_one_by_one(compute):
    cluster = Cluster(2, Link(1e-5, 1e9), Link(1e-4, 2e8))
    overlap = Overlap(gradient_bytes=1e8, bucket_bytes=1.1e7)
    buckets = math.ceil(1e8 / 1.1e7)
    one, end = cluster.allreduce(1e8 / buckets, 8), 0.0
    for i in range(buckets):  # DDP's schedule, step by step
        full = compute / 3 + compute * 2 / 3 * (i + 1) / buckets
        end = max(end, full) + one
    assert overlap.exposed(compute, cluster, 8) == pytest.approx(end - compute)
    assert overlap.exposed([compute, compute], cluster, 1).tolist() == [0, 0]
    bare = Overlap(gradient_bytes=1e8, overlapped=False)
    assert bare.exposed(compute, cluster, 8) == pytest.approx(cluster.allreduce(1e8, 8))


def test_overlap_of_any_buckets_is_that_of_the_schedule():
    rng = np.random.default_rng(derived(0))
    cluster = Cluster(2, Link(1e-5, 1e9), Link(1e-4, 2e8))
    for _ in range(50):
        count = int(rng.integers(1, 8))
        ready = np.sort(rng.uniform(size=count))
        ready[-1] = 1
        sizes = [tuple(rng.uniform(0, 3e7, size=rng.integers(1, 4))) for _ in range(count)]
        compute, share = rng.uniform(0, 2), rng.uniform(0.5, 1)
        begin, end = compute * (1 - share), 0.0
        for parts, full in zip(sizes, ready, strict=True):
            end = max(end, begin + full * compute * share)
            end += sum(cluster.allreduce(size, 8) for size in parts)
        buckets = [SyncBucket(*one) for one in zip(sizes, 1 - ready, strict=True)]
        found = BucketOverlap(buckets, share).exposed([compute, compute], cluster, 8)
        assert found == pytest.approx(end - compute)
        assert BucketOverlap(buckets, share).exposed(compute, cluster, 1) == 0


def test_the_backward_pass_hides_all_but_the_last_buckets():
    buckets = fill_buckets(gradients_of(BASE, 0.1))
    sent = sync_buckets(buckets, "none")
    cluster = Cluster(1, network=Link(0, 1e9))
    seconds = [cluster.allreduce(4 * bucket.numel, 4) for bucket in buckets]
    last = [time for time, bucket in zip(seconds, buckets, strict=True) if bucket.ready > 0.999]
    assert exposed_seconds(sent, 1e3, cluster, 4) == pytest.approx(sum(last), rel=1e-3)
    assert exposed_seconds(sent, 0, cluster, 4) == pytest.approx(sum(seconds))
    assert len(last) < 3 < len(buckets)
    assert buckets[-1].numel > 23e6  # the word embedding's
