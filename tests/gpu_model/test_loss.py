"""The CUDA kernels of masked_cross_entropy on the model of a block: barriers."""

import torch

from tests.support.model_checks import assert_every_site_is_needed
from tests.support.model_loss import masked_cross_entropy, masked_cross_entropy_backward, model


def test_every_barrier_is_needed() -> None:
    logits, labels = torch.randn(5, 680).bfloat16(), torch.randint(680, (5,))

    def run() -> None:
        _, _, lse = masked_cross_entropy(logits, labels, 680, -100)
        masked_cross_entropy_backward(torch.ones(()), logits, labels, lse, 680, -100)

    sites = assert_every_site_is_needed(model(), run, seeds=range(3))
    assert [site.kind for site in sites] == ["sync_block"] * 2
