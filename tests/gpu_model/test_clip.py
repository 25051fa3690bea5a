"""The CUDA kernels of clip_bucket_ on the model of a block: barriers."""

import math

import torch

from tests.support.model_checks import assert_every_site_is_needed
from tests.support.model_clip import clip_bucket_into, model


def test_every_barrier_is_needed() -> None:
    model().set_device()
    bucket, out = torch.randn(1029), torch.full((1029,), math.nan).bfloat16()
    sites = assert_every_site_is_needed(
        model(), lambda: clip_bucket_into(bucket, out, None, 1.0, None, 0.5), seeds=range(3)
    )
    assert [site.kind for site in sites] == ["sync_block", "sync_block"]
