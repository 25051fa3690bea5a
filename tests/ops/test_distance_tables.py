"""Position biases that are tables by distance alone, as T5's. On a GPU the backward pass has a way
of its own for few distances and buckets and consecutive queries (csrc/attention/table_bias.h)."""

from functools import partial
from typing import Any

import pytest
import torch

from bert_unpad.batch import VarlenBatch
from tests.support.attention_cases import (
    DTYPES,
    Case,
    Kernels,
    compare,
    kinds,
    random_buckets,
    random_positions,
    with_gradients,
)
from tests.support.backends import Backend
from tests.support.seeds import derived

LENGTHS, QUERIES = [150, 3, 64, 0], [90, 20, 0, 4]
CROSS: dict[str, Any] = {"q_lengths": QUERIES, "kv_heads": 1}


@pytest.mark.parametrize(
    ("reach", "count", "options"),
    [
        pytest.param(135, 64, CROSS, id="most_distances_and_buckets"),
        pytest.param(1, 2, {}, id="three_distances"),
        pytest.param(9, 5, {"window": (20, 33)}, id="window"),
        pytest.param(30, 40, CROSS | {"window": (-1, 0)}, id="causal"),
        pytest.param(20, 6, {"parts": ("table", "key")}, id="table_and_key"),
        pytest.param(20, 6, {"parts": ("table", "query")}, id="table_and_query"),
        pytest.param(136, 7, {}, id="too_many_distances"),
        pytest.param(40, 65, {}, id="too_many_buckets"),
        pytest.param(20, 6, CROSS | {"given": True}, id="given_positions"),
    ],
)
@kinds("fused", "wgmma_fused")
def test_tables(
    backend: Backend,
    kernels: Kernels,
    dtype: torch.dtype,
    reach: int,
    count: int,
    options: dict[str, Any],
) -> None:
    torch.manual_seed(derived(1))
    options = {"parts": ("table",), "buckets": random_buckets(reach, count), "p": 0.1} | options
    if options.pop("given", False):
        options["positions"] = random_positions(QUERIES, LENGTHS)
    compare(Case(LENGTHS, **options), dtype, backend.device)


@pytest.mark.parametrize("reach", [20, 200])
@kinds("fused", "wgmma_fused", dtypes=DTYPES[1:])
def test_biases_whose_exponentials_overflow(
    backend: Backend, kernels: Kernels, dtype: torch.dtype, reach: int
) -> None:
    """Rows beyond a sequence's end have biases too, and count for nothing."""
    torch.manual_seed(derived(3))
    buckets = random_buckets(reach, 6)
    case = Case([70, 5], parts=("table",), buckets=buckets, p=0.1, shift=300.0)
    compare(case, dtype, backend.device)


@pytest.mark.parametrize("head_dim", [32, 96, 128])
@kinds("fused")
def test_head_dims_and_grouped_heads(
    backend: Backend, kernels: Kernels, dtype: torch.dtype, head_dim: int
) -> None:
    torch.manual_seed(derived(head_dim))
    options = {"parts": ("table",), "buckets": random_buckets(40, 33), "kv_heads": 1}
    compare(Case([100, 0, 5], head_dim=head_dim, **options), dtype, backend.device)


@kinds("fused", "wgmma_fused", dtypes=[torch.bfloat16])
def test_same_bits_every_time_and_with_every_schedule(
    backend: Backend, kernels: Kernels, dtype: torch.dtype
) -> None:
    torch.manual_seed(derived(2))
    lengths = [129, 16, 70] if backend.name != "cuda" else [1600, 40, 900]
    options = {"parts": ("table",), "buckets": random_buckets(50, 20), "kv_heads": 1, "p": 0.1}
    case = Case(lengths, **options)
    inputs, dout = backend.put((case.inputs(dtype), case.dout(dtype)))
    backend.assert_same_bits(partial(with_gradients, case.ours, inputs, dout))
    batch = VarlenBatch.from_lengths(lengths, backend.device)
    expected = with_gradients(case.ours, inputs, dout)
    for schedule in ("list", "groups"):
        run = partial(case.ours, batch=batch, schedule=schedule)
        for a, b in zip(with_gradients(run, inputs, dout), expected, strict=True):
            assert torch.equal(a, b)
