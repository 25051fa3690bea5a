"""The CUDA kernels of embedding_layer_norm on the model of a block: the sort, and barriers."""

import pytest
import torch

from tests.support.model_checks import assert_every_site_is_needed
from tests.support.model_embedding import (
    embedding_layer_norm,
    embedding_layer_norm_backward,
    model,
    sort,
)
from tests.support.op_checks import RNG, embedding_operands
from tests.support.seeds import derived


@pytest.mark.parametrize("entries", [1, 2, 256, 257, 30522, 70000])
def test_the_sort_is_pytorchs_stable_one(entries: int) -> None:
    torch.manual_seed(derived(2))
    for tokens in (1, 33, 1100):
        ids = torch.randint(entries, (tokens,))
        ids[tokens // 3 : tokens // 2] = entries - 1
        got, order, first = sort(ids, entries)
        want = torch.sort(ids, stable=True)
        assert torch.equal(got.long(), want.values)
        assert torch.equal(order.long(), want.indices)
        assert torch.equal(first.long(), torch.searchsorted(want.values, torch.arange(entries + 1)))


@pytest.mark.parametrize("wrong", [-1, 20, 2**32])
def test_the_sort_stops_at_ids_out_of_range(wrong: int) -> None:
    with pytest.raises(RuntimeError, match=r"position_ids must be in \[0, entries of"):
        sort(torch.tensor([0, 5, wrong, 1]), 20)


def test_every_barrier_is_needed() -> None:
    torch.manual_seed(derived(5))
    ids, params, dy = embedding_operands((300, 20, 2), 40, 16, torch.float32, torch.bfloat16)
    model().set_device(multiprocessors=1)

    def run() -> None:
        _, *statistics = embedding_layer_norm(*ids, *params, 0.1, 1e-5, dy.dtype, RNG)
        embedding_layer_norm_backward(dy, *ids, *params[:4], *statistics, 0.1, RNG)

    sites = assert_every_site_is_needed(model(), run)
    # Of the rows 4, of their ticket 2, of the sort 3 in warps and 3 in a block.
    assert [site.kind for site in sites].count("sync_warp") == 3
    assert len(sites) == 12, sites
