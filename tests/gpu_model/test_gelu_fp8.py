"""GELU that writes 8 bits on the model of a block: barriers."""

import torch

from tests.support.model_checks import assert_every_site_is_needed
from tests.support.model_fp8 import bias_gelu_fp8, bias_gelu_fp8_backward, gelu_model


def test_every_barrier_is_needed() -> None:
    gelu_model().set_device(multiprocessors=1)
    x, bias, dy, scale = torch.randn(300, 144), torch.randn(144), torch.randn(300, 144), 0.02

    def both() -> None:
        noted = (torch.tensor(scale), torch.zeros(1024))
        bias_gelu_fp8(x, bias, False, *noted, True)
        bias_gelu_fp8_backward(dy, x, bias, False, *noted, False)

    sites = assert_every_site_is_needed(gelu_model(), both, seeds=range(3))
    assert {site.kind for site in sites} == {"sync_block"}
