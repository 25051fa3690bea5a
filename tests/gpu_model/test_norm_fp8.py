"""dropout_add_layer_norm that writes 8 bits too, on the model of a block: barriers."""

import torch

from tests.support.model_checks import assert_every_site_is_needed
from tests.support.model_fp8 import dropout_add_layer_norm_fp8
from tests.support.model_norm import model
from tests.support.op_checks import RNG
from tests.support.seeds import derived


def test_every_barrier_is_needed() -> None:
    """After the parameters, in each turn, and for the largest value."""
    torch.manual_seed(derived(64))
    model().set_device(multiprocessors=1)
    x, residual = torch.randn(2, 150, 64).bfloat16()
    weight, bias, x_bias = torch.randn(3, 64)
    operands = (x, x_bias, residual, weight, bias, 0.1, 1e-5, RNG, False, False)

    def run() -> None:
        dropout_add_layer_norm_fp8(*operands, torch.tensor(0.01), torch.zeros(1024), True)

    sites = assert_every_site_is_needed(model(), run, seeds=range(3))
    assert [site.kind for site in sites] == ["sync_block"] * 3
