"""Gradients of captured passes sent bucket by bucket beside the rest of the pass, on a GPU.

Without a GPU: tests/pretrain/gradients/test_graph_buckets.py.
"""

import math
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("tqdm", reason="the trainer needs the extra `pretrain`")

from bert_unpad.distributed import BucketClip
from bert_unpad.pretrain.gradients.cuda_graphs import GraphRunner
from bert_unpad.pretrain.gradients.graph_buckets import GraphBuckets
from tests.cuda.test_graphs import ONE, gradients, padded_inputs, scaled
from tests.nn.test_bert import make_model
from tests.support.cuda_checks import GPU_ONLY, raise_if_the_host_waits

pytestmark = GPU_ONLY
BATCHES = [[12, 9, 0, 5, 1], [24, 24, 3], [24] * 5, [1], [24, 24, 3]]
LIMIT_MB = 0.1


@pytest.fixture
def nccl():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make(clip: BucketClip, allreduce=None):
    model = make_model(hidden_size=128, num_attention_heads=2, num_hidden_layers=6).cuda()
    buckets = GraphBuckets(model, LIMIT_MB)
    buckets.attach(clip, allreduce)
    return model, buckets, GraphRunner(model, nullcontext())


def eager(lengths: list[int], seed: int) -> list[Tensor]:
    model = make_model(hidden_size=128, num_attention_heads=2, num_hidden_layers=6).cuda()
    out = model(padded_inputs(lengths, seed).to("cuda"))
    (out.mlm_loss_sum + out.nsp_loss_sum).backward()
    return gradients(model)


@pytest.mark.usefixtures("nccl")
def test_a_bucket_is_sent_when_it_is_complete():
    """What the second stream finds in a bucket is what the pass leaves there."""
    sent: list[Tensor] = []

    def copy(tensor: Tensor) -> torch.futures.Future[Tensor]:
        sent.append(tensor.clone())
        future = torch.futures.Future(devices=[tensor.device])
        future.set_result(tensor)
        return future

    model, buckets, run = make(BucketClip(math.inf), copy)
    assert len(buckets.buckets) > 6
    for _ in range(3):  # with captures between replays, and then replays alone
        for seed, lengths in enumerate(BATCHES):
            sent.clear()
            model.zero_grad(set_to_none=False)
            run(padded_inputs(lengths, seed).pin_memory(), scaled(ONE, "cuda"))
            buckets.send()
            buckets.wait()
            for flat, bucket in zip(sent, buckets.buckets, strict=True):
                assert torch.equal(flat, bucket.flat)
            for got, want in zip(gradients(model), eager(lengths, seed), strict=True):
                assert torch.equal(got, want)


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_clipped_buckets_on_nccl(wire):
    model, buckets, run = make(clip := BucketClip(0.5, wire_dtype=wire))
    bound = 0.5 / math.sqrt(len(buckets.buckets))
    for seed, lengths in enumerate(BATCHES * 2):
        model.zero_grad(set_to_none=False)
        run(padded_inputs(lengths, seed).pin_memory(), scaled(ONE, "cuda"))
        buckets.send()
        buckets.wait()
        report = clip.report()
        assert bool(report.finite)
        norms = [float(bucket.flat.norm()) for bucket in buckets.buckets]
        rel = 1e-5 if wire is None else 1e-2
        for norm, before in zip(norms, report.norms.tolist(), strict=True):
            assert norm == pytest.approx(min(before, bound), rel=rel)


@pytest.mark.usefixtures("nccl")
def test_the_host_does_not_wait():
    model, buckets, run = make(clip := BucketClip(0.5))
    inputs, scale = padded_inputs([12, 9, 3]).pin_memory(), scaled(ONE, "cuda")
    for _ in range(2):
        run(inputs, scale)
        buckets.send()
        buckets.wait()
    with raise_if_the_host_waits():
        model.zero_grad(set_to_none=False)
        run(inputs, scale)
        buckets.send()
        buckets.wait()
        report = clip.report()
    assert bool(report.finite)
