"""The CUDA kernels of dropout_add_layer_norm on the model of a block: barriers, scratch memory."""

import ctypes

import pytest
import torch

from tests.support.model_checks import assert_every_site_is_needed
from tests.support.model_norm import (
    NormCudaParams,
    RowNormParams,
    dropout_add_layer_norm,
    dropout_add_layer_norm_backward,
    model,
)
from tests.support.op_checks import RNG
from tests.support.seeds import derived


def test_scratch_memory_of_a_large_layer() -> None:
    """The counts of docs/development/column-sums.md."""
    kernels = model()
    kernels.set_device(multiprocessors=132)
    params = NormCudaParams(norm=RowNormParams(dtype=1))  # bfloat16
    params.norm.rows, params.norm.hidden = 12288, 1024
    sizes = (ctypes.c_int64 * 2)()
    kernels.call("norm_scratch", ctypes.byref(params), sizes)
    assert list(sizes) == [132 + 11, 12]


@pytest.mark.parametrize(
    ("hidden", "barriers"),
    # After the parameters, forward and backward; for the row that was copied ahead, in both; around
    # the sums over warps; in sums over a row that a block holds; around the ticket.
    [(64, 8), (1032, 5), (13, 3)],
)
def test_every_barrier_is_needed(hidden: int, barriers: int) -> None:
    torch.manual_seed(derived(7))
    x, residual, dy = torch.randn(3, 5, hidden).bfloat16()
    weight, bias, x_bias = torch.randn(3, hidden)
    operands = (x, x_bias, residual, weight)
    model().set_device(multiprocessors=1)

    def run() -> None:
        *_, mean, rstd = dropout_add_layer_norm(*operands, bias, 0.1, 1e-5, RNG)
        dropout_add_layer_norm_backward(dy, *operands, mean, rstd, 0.1, RNG)

    sites = assert_every_site_is_needed(model(), run)
    assert len(sites) == barriers, sites
