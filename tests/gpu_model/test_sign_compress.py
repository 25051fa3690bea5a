"""The CUDA kernels of the sign_* operators on the model of a block: barriers."""

import torch

from tests.support.model_checks import assert_every_site_is_needed
from tests.support.model_signs import model, sign_scale


def test_every_barrier_is_needed() -> None:
    model().set_device()
    value, error = torch.randn(2, 3000)
    sites = assert_every_site_is_needed(model(), lambda: sign_scale(value, error), seeds=range(3))
    assert [site.kind for site in sites] == ["sync_block"]  # that of sum_over_y, in both kernels
