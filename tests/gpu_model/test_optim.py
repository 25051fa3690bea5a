"""The CUDA kernels of the operators over lists of tensors on the model of a block: barriers."""

import pytest
import torch

from tests.support import frozen_reference
from tests.support.model_checks import assert_every_site_is_needed
from tests.support.model_optim import frozen_lamb_sums_, lamb_, model, stable_adamw_
from tests.support.optim_reference import draw_state


@pytest.mark.parametrize(
    ("update", "more"),
    [(lamb_, (None, None, None, None)), (stable_adamw_, (None, None, None))],
    ids=["lamb", "stable"],
)
def test_every_barrier_of_an_update_is_needed(update, more) -> None:
    flags = (True, True, True, False, False) if update is lamb_ else (False,)

    def run() -> None:
        state = draw_state([(600,)], torch.float32)
        lists = (state.params, [torch.ones(600)], state.exp_avgs, state.exp_avg_sqs, [])
        numbers = (0.9, 0.99, 1e-6, 0.1, 0.0)
        update(*lists, state.steps, torch.tensor(0.01), *more, *numbers, *flags)

    sites = assert_every_site_is_needed(model(), run)
    assert sites
    assert {site.kind for site in sites} == {"sync_block"}


def test_every_barrier_of_frozen_sums_is_needed() -> None:
    state, fresh = frozen_reference.draw([(600,)], torch.float32, False), [torch.ones(600)]
    lists = (state.params, [torch.randn(600)], state.exp_avgs, state.exp_avg_sqs, fresh)
    sites = assert_every_site_is_needed(
        model(), lambda: frozen_lamb_sums_(*lists, None, 0.9, 0.99, 1e-6, 0.1), seeds=range(3)
    )
    assert [site.kind for site in sites] == ["sync_block"] * 2
