"""The CUDA kernels of bias_gelu and glu on the model of a block: barriers, and scratch memory."""

import ctypes

import pytest
import torch

from tests.support.model_checks import DTYPES, assert_every_site_is_needed
from tests.support.model_gelu import (
    bias_gelu,
    bias_gelu_backward,
    gelu_model,
    glu,
    glu_backward,
    glu_model,
)


def test_scratch_memory_of_a_large_layer() -> None:
    """The counts of docs/development/column-sums.md."""
    gelu_model().set_device(multiprocessors=132)
    sizes = (ctypes.c_int64 * 2)()
    gelu_model().call("gelu_scratch", DTYPES[torch.bfloat16], 12288, 4096, None, None, None, sizes)
    assert list(sizes) == [24, 32 * 2]


@pytest.mark.parametrize(
    ("model", "forward", "backward", "form"),
    [(gelu_model, bias_gelu, bias_gelu_backward, False), (glu_model, glu, glu_backward, 0)],
    ids=["bias_gelu", "glu"],
)
def test_every_barrier_is_needed(model, forward, backward, form) -> None:
    kernels = model()
    kernels.set_device()
    x, bias = torch.randn(37, 48).bfloat16(), torch.randn(48)

    def run() -> None:
        backward(forward(x, bias, form), x, bias, form)

    sites = assert_every_site_is_needed(kernels, run, seeds=range(5))
    assert [site.kind for site in sites] == ["sync_block"] * 3
