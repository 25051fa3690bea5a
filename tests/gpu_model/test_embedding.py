"""The CUDA kernels of embedding_layer_norm, run on the model of a block.

Values and gradients against the plain reference, the sort against PyTorch's, masks against the CPU
operator, the same bits from every order of threads, and a check that each barrier is needed.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from bert_unpad import ops
from gpu_model.block_model import POLICIES
from gpu_model.build import compiler
from tests.support import reference
from tests.support.model_checks import assert_every_site_is_needed
from tests.support.model_embedding import embedding, model, sort
from tests.support.op_checks import RNG, embedding_ids, embedding_operands, results_of
from tests.support.seeds import derived

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")

ENTRIES = (300, 20, 2)  # word, position, token type
NAMES = ["y", "dword", "dposition", "dtoken_type", "dweight", "dbias"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def kernels():
    kernels = model()
    kernels.configure()
    kernels.set_device(multiprocessors=1)
    return kernels


draw_ids = partial(embedding_ids, ENTRIES)
draw = partial(embedding_operands, ENTRIES)


def run(ids: list[Tensor], params: list[Tensor], dy: Tensor, p: float) -> dict[str, Tensor]:
    return embedding(ids, params[:3], *params[3:], dy, out_dtype=dy.dtype, p=p, rng=RNG)


def compare(ids: list[Tensor], params: list[Tensor], dy: Tensor, p: float) -> None:
    # Plain PyTorch computes in the dtype that tables and result share.
    results = run(ids, params, dy, p)
    reference.assert_as_good_as_pytorch(
        lambda: [results[name] for name in NAMES],
        lambda precision: results_of(
            lambda *t: reference.embedding_layer_norm(*ids, *t, dropout_p=p, rng=RNG),
            params,
            dy,
            precision,
        ),
        dy.dtype,
        NAMES,
    )


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("hidden", [7, 8, 64, 128, 768, 1000, 1024, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_the_reference(dtype: torch.dtype, hidden: int, p: float) -> None:
    torch.manual_seed(derived(hidden))
    compare(*draw(45 if hidden <= 64 else 9 if hidden <= 1024 else 3, hidden, dtype, dtype), p)


@pytest.mark.parametrize("hidden", [13, 64, 264])
@pytest.mark.parametrize("out_dtype", DTYPES[1:])
def test_fp32_tables_under_16_bit_activations(out_dtype: torch.dtype, hidden: int) -> None:
    torch.manual_seed(derived(0))
    ids, params, dy = draw(20, hidden, torch.float32, out_dtype)
    results = run(ids, params, dy, 0.3)
    truth = results_of(
        lambda *t: reference.embedding_layer_norm(*ids, *t, dropout_p=0.3, rng=RNG),
        params,
        dy,
        torch.float64,
    )
    for name, t in zip(NAMES, truth, strict=True):
        got = results[name]
        # One rounding of y, and none of the gradients.
        eps = torch.finfo(got.dtype).eps if name == "y" else 0.0
        assert got.dtype == (out_dtype if name == "y" else torch.float32)
        assert ((got - t).abs() <= 0.51 * eps * t.abs() + 1e-5 * t.abs().max()).all(), name


@pytest.mark.parametrize("hidden", [5, 8])
@pytest.mark.parametrize("tokens", [0, 1, 128, 129, 257, 700])
def test_any_number_of_tokens(tokens: int, hidden: int) -> None:
    """Pieces of long runs that begin and end anywhere."""
    torch.manual_seed(derived(tokens))
    compare(*draw(tokens, hidden, torch.float32, torch.float32), 0.0)


def test_a_run_of_exactly_a_piece_and_one_more() -> None:
    torch.manual_seed(derived(1))
    for first, second in [(128, 128), (129, 129), (1, 256), (100, 129), (127, 130)]:
        ids, params, dy = draw(first + second + 3, 8, torch.float32, torch.float32)
        ids[0] = torch.tensor([5] * first + [9] * second + [11] * 3)
        compare(ids, params, dy, 0.0)


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


@pytest.mark.parametrize(
    ("hidden", "dtype"), [(520, torch.bfloat16), (13, torch.float32), (72, torch.float32)]
)
def test_masks_are_those_of_the_cpu_operator(hidden: int, dtype: torch.dtype) -> None:
    torch.manual_seed(derived(3))
    ids, params, dy = draw(11, hidden, dtype, dtype)
    rtol, atol = (1e-4, 1e-5) if dtype == torch.float32 else (0.02, 0.5)
    for p in (0.1, 0.99):
        got = run(ids, params, dy, p)["y"]
        want = ops.embedding_layer_norm(*ids, *params, dropout_p=p, rng=RNG)
        assert torch.equal(got == 0, want == 0)
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


@pytest.mark.parametrize("table", range(3))
@pytest.mark.parametrize("wrong", ["-1", "entries", "huge"])
def test_ids_out_of_range_stop_the_kernel(table: int, wrong: str) -> None:
    ids, params, dy = draw(6, 16, torch.float32, torch.float32)
    name = ("input_ids", "position_ids", "token_type_ids")[table]
    # 2^32 is an entry's number if only 32 bits are looked at.
    ids[table][4] = {"-1": -1, "entries": ENTRIES[table], "huge": 2**32}[wrong]
    with pytest.raises(RuntimeError, match=rf"{name} must be in \[0, entries of"):
        run(ids, params, dy, 0.0)
    if table == 1:
        with pytest.raises(RuntimeError, match=rf"{name} must be in \[0, entries of"):
            sort(ids[1], ENTRIES[1])


@pytest.mark.parametrize("hidden", [13, 64, 264])
def test_same_bits_in_any_order_of_threads_and_blocks(kernels, hidden: int) -> None:
    torch.manual_seed(derived(4))
    kernels.set_device(multiprocessors=2)
    ids, params, dy = draw(150 if hidden < 64 else 20, hidden, torch.float32, torch.bfloat16)
    runs = []
    for policy in POLICIES:
        for seed in range(2):
            kernels.configure(policy, seed)
            runs.append(run(ids, params, dy, 0.1))
    for other in runs[1:]:
        for name, x in other.items():
            assert torch.equal(x, runs[0][name]), name


def test_every_barrier_is_needed(kernels) -> None:
    torch.manual_seed(derived(5))
    ids, params, dy = draw(40, 16, torch.float32, torch.bfloat16)
    sites = assert_every_site_is_needed(kernels, lambda: run(ids, params, dy, 0.1))
    # Of the rows 4, of their ticket 2, of the sort 3 in warps and 3 in a block.
    assert [site.kind for site in sites].count("sync_warp") == 3
    assert len(sites) == 12, sites
