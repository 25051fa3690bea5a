"""Embeddings + LayerNorm + dropout against the plain reference."""

import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from bert_unpad import ops
from tests.support import reference
from tests.support.backends import Backend
from tests.support.op_checks import (
    RNG,
    assert_compiles_to_the_same_bits,
    embedding_operands,
    results_of,
)
from tests.support.seeds import derived

ENTRIES = (90, 20, 2)  # word, position, token type
IDS = ("input_ids", "position_ids", "token_type_ids")
NAMES = ["y", "dword", "dposition", "dtoken_type", "dln_weight", "dln_bias"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
draw = partial(embedding_operands, ENTRIES)
# Of BERT's tables.
draw_large = partial(embedding_operands, (30522, 512, 2))


def run(
    module, ids: list[Tensor], params: list[Tensor], dout: Tensor, p: float,
    precision: torch.dtype | None = None, **settings,
) -> list[Tensor]:  # fmt: skip
    rng = RNG.to(dout.device)
    return results_of(
        lambda *t: module.embedding_layer_norm(*ids, *t, dropout_p=p, rng=rng, **settings),
        params,
        dout,
        precision,
    )


def compare(ids: list[Tensor], params: list[Tensor], dout: Tensor, p: float) -> None:
    # Plain PyTorch computes in the dtype that tables and result share.
    reference.assert_as_good_as_pytorch(
        lambda: run(ops, ids, params, dout, p),
        lambda precision: run(reference, ids, params, dout, p, precision),
        dout.dtype,
        NAMES,
    )


SHAPES = [
    *[(45, 7), (45, 8), (45, 64), (9, 128), (9, 264), (9, 768), (9, 1000), (9, 1024), (3, 4096)],
    *(pytest.param((70, n), marks=pytest.mark.backends("cpu")) for n in (5, 100, 768)),
]


@pytest.mark.sanitizer
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_the_reference(
    backend: Backend, dtype: torch.dtype, shape: tuple[int, int], p: float
) -> None:
    torch.manual_seed(derived(shape[1]))
    compare(*backend.put(draw(*shape, dtype, dtype)), p)


@pytest.mark.backends("cuda")
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize(
    "shape",
    [
        *[(0, 768), (1, 3), (1000, 7), (5000, 64), (3000, 256), (13_000, 768), (9001, 1000)],
        *[(20_000, 1024), (300, 4096), (50, 4100)],
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_tables(
    backend: Backend, dtype: torch.dtype, shape: tuple[int, int], p: float
) -> None:
    torch.manual_seed(derived(0))
    compare(*backend.put(draw_large(*shape, dtype, dtype)), p)


@pytest.mark.sanitizer
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("hidden", [13, 64, 264])
@pytest.mark.parametrize("out_dtype", DTYPES[1:])
def test_fp32_tables_under_16_bit_activations(
    backend: Backend, out_dtype: torch.dtype, hidden: int, p: float
) -> None:
    torch.manual_seed(derived(0))
    ids, params, dout = backend.put(draw(40, hidden, torch.float32, out_dtype))
    truth = run(reference, ids, params, dout, p, torch.float64)
    results = run(ops, ids, params, dout, p, out_dtype=out_dtype)
    for name, got, want in zip(NAMES, results, truth, strict=True):
        # One rounding of y, and none of the gradients.
        eps = torch.finfo(got.dtype).eps if name == "y" else 0.0
        assert got.dtype == (out_dtype if name == "y" else torch.float32)
        limit = 0.51 * eps * want.abs() + 1e-5 * want.abs().max()
        assert ((got - want).abs() <= limit).all(), name


@pytest.mark.parametrize("hidden", [5, 8])
@pytest.mark.parametrize("tokens", [0, 1, 128, 129, 257, 700])
def test_any_number_of_tokens(backend: Backend, tokens: int, hidden: int) -> None:
    """Pieces of long runs that begin and end anywhere."""
    torch.manual_seed(derived(tokens))
    compare(*backend.put(draw(tokens, hidden, torch.float32, torch.float32)), 0.0)


@pytest.mark.parametrize("runs", [(128, 128), (129, 129), (1, 256), (100, 129), (127, 130)])
def test_a_run_of_exactly_a_piece_and_one_more(backend: Backend, runs: tuple[int, int]) -> None:
    torch.manual_seed(derived(1))
    ids, params, dout = draw(sum(runs) + 3, 8, torch.float32, torch.float32)
    ids[0] = torch.tensor([5] * runs[0] + [9] * runs[1] + [11] * 3)
    compare(*backend.put((ids, params, dout)), 0.0)


@pytest.mark.backends("cpu", "cuda")
@pytest.mark.parametrize("tokens", [1500, pytest.param(30_000, marks=pytest.mark.backends("cuda"))])
def test_words_with_very_many_tokens(backend: Backend, tokens: int) -> None:
    torch.manual_seed(derived(1))
    ids, params, dout = backend.put(draw(tokens, 37, torch.float32, torch.float32))
    compare(ids, params, dout, 0.1)
    compare([torch.full_like(x, 1) for x in ids], params, dout, 0.0)


def test_words_that_do_not_occur_get_zeros(backend: Backend) -> None:
    ids, params, dout = backend.put(draw(50, 16, torch.float32, torch.float32))
    _, dword, dposition, *_ = run(ops, ids, params, dout, 0.0)
    assert not dword[80:].any()
    assert (dword[3] != 0).all()
    assert (dposition != 0).all()


@pytest.mark.parametrize("p", [0.1, 0.99])
@pytest.mark.parametrize(
    ("tokens", "hidden", "dtype"),
    [
        *[(11, 520, torch.bfloat16), (11, 13, torch.float32), (11, 72, torch.float32)],
        pytest.param(500, 768, torch.float32, marks=pytest.mark.backends("cpu", "cuda")),
    ],
)
def test_dropout_comes_after_the_layer_norm(
    backend: Backend, tokens: int, hidden: int, dtype: torch.dtype, p: float
) -> None:
    """An output is either 0 or the scaled LayerNorm: the same masks on every device."""
    ids, params, dout = backend.put(draw(tokens, hidden, dtype, dtype))
    y, plain = (run(ops, ids, params, dout, rate)[0] for rate in (p, 0.0))
    mask = reference.row_mask(RNG, p, *y.shape).to(y.device)
    assert torch.equal(y != 0, mask & (plain != 0))
    want = plain * mask * reference.dropout_scale(p)
    torch.testing.assert_close(y, want, rtol=max(1e-6, torch.finfo(dtype).eps), atol=1e-6)


def test_output_is_in_the_tables_dtype_unless_told(backend: Backend) -> None:
    ids, params, _ = backend.put(draw(5, 16, torch.bfloat16, torch.bfloat16))
    assert ops.embedding_layer_norm(*ids, *params).dtype == torch.bfloat16


def test_no_tokens(backend: Backend) -> None:
    ids, params, dout = backend.put(draw(0, 16, torch.float32, torch.float32))
    y, *gradients = run(ops, ids, params, dout, 0.1)
    assert y.shape == (0, 16)
    for gradient, param in zip(gradients, params, strict=True):
        assert torch.equal(gradient, torch.zeros_like(param))


def test_strided_ids(backend: Backend) -> None:
    ids, params, _ = backend.put(draw(30, 16, torch.float32, torch.float32))
    strided = [torch.stack([i, i], -1)[:, 0] for i in ids]
    assert torch.equal(
        ops.embedding_layer_norm(*ids, *params), ops.embedding_layer_norm(*strided, *params)
    )


@pytest.mark.parametrize(
    "shape",
    [
        *[(150, 13), (20, 64), (20, 264)],
        pytest.param((1500, 48), marks=pytest.mark.backends("cpu", "cuda")),
        *(pytest.param((13_001, n), marks=pytest.mark.backends("cuda")) for n in (13, 1024)),
    ],
    ids=str,
)
def test_same_bits_every_time(backend: Backend, shape: tuple[int, int]) -> None:
    torch.manual_seed(derived(2))
    backend.assume(multiprocessors=2)
    ids, params, dout = backend.put(draw(*shape, torch.float32, torch.bfloat16))
    backend.assert_same_bits(lambda: run(ops, ids, params, dout, 0.1, out_dtype=torch.bfloat16))


@pytest.mark.parametrize("table", range(3))
@pytest.mark.parametrize("wrong", [-1, "entries", 2**32])
@pytest.mark.backends("block", "ptx")
def test_ids_out_of_range_stop_the_kernel(backend: Backend, table: int, wrong: int | str) -> None:
    ids, params, _ = draw(6, 16, torch.float32, torch.float32)
    ids[table][4] = ENTRIES[table] if wrong == "entries" else wrong
    with pytest.raises(RuntimeError, match=rf"{IDS[table]} must be in \[0, entries of"):
        ops.embedding_layer_norm(*ids, *params)


_OUT_OF_RANGE = """
import sys, torch
from bert_unpad import ops
ids = [torch.zeros(3, dtype=torch.int64, device="cuda") for _ in range(3)]
ids[int(sys.argv[1])][1] = int(sys.argv[2])
rows = torch.randn(2, 16, device="cuda")
ops.embedding_layer_norm(*ids, *[rows] * 3, rows[0], rows[0])
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("table", range(3))
@pytest.mark.parametrize("wrong", [-1, 2**32])
@pytest.mark.backends("cuda")
def test_ids_out_of_range_stop_the_kernel_of_a_gpu(
    backend: Backend, table: int, wrong: int
) -> None:
    """In its own process: the CUDA context does not survive it."""
    command = [sys.executable, "-c", _OUT_OF_RANGE, str(table), str(wrong)]
    out = subprocess.run(command, capture_output=True, text=True)
    assert out.returncode != 0
    assert f"{IDS[table]} must be in [0, entries of" in out.stderr
    assert "device-side assert" in out.stderr


@pytest.mark.backends("cpu", "cuda")
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_opcheck(backend: Backend, p: float) -> None:
    ids, params, _ = backend.put(draw(9, 20, torch.float32, torch.float32))
    leaves = [t.requires_grad_() for t in params]
    args = (*ids, *leaves, p, 1e-12, torch.bfloat16, backend.put(RNG) if p else None)
    opcheck(torch.ops.bert_unpad.embedding_layer_norm, args)


def test_compiles_without_graph_breaks() -> None:
    ids, params, _ = draw(9, 20, torch.float32, torch.float32)
    leaves = [t.requires_grad_() for t in params]

    def f(*t: Tensor) -> Tensor:
        y = ops.embedding_layer_norm(*ids, *t, dropout_p=0.1, rng=RNG, out_dtype=torch.bfloat16)
        return y.float().square().sum()

    assert_compiles_to_the_same_bits(f, leaves)


def _ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


OUT_OF_RANGE = [
    ({"input_ids": _ids(0, 90, 1)}, r"input_ids\[1\] = 90 is not in \[0, 90\), .* of word"),
    ({"input_ids": _ids(0, 1, -1)}, r"input_ids\[2\] = -1 is not in"),
    ({"position_ids": _ids(20, 0, 1)}, r"position_ids\[0\] = 20 is not in \[0, 20\)"),
    ({"token_type_ids": _ids(0, 0, 2)}, r"token_type_ids\[2\] = 2 is not in \[0, 2\)"),
]


@pytest.mark.backends("cpu", "cuda")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(pytest.param(*case, marks=pytest.mark.backends("cpu")) for case in OUT_OF_RANGE),
        ({"token_type_ids": _ids(0, 0)}, r"token_type_ids must have shape \[tokens\], got \[2\]"),
        ({"input_ids": _ids(0, 1, 2).int()}, "input_ids must be int64"),
        ({"word": torch.randn(90)}, r"word must have shape \[entries, hidden\]"),
        ({"word": torch.randn(90, 16).double()}, "must be float32, bfloat16 or float16"),
        ({"word": torch.randn(16, 90).t()}, "word must be contiguous"),
        ({"position": torch.randn(20, 15)}, r"position must have shape .*, got \[20, 15\]"),
        ({"position": torch.randn(20, 16).half()}, "position must have the dtype of word"),
        ({"ln_weight": torch.randn(15)}, r"ln_weight must have shape \[16\], got \[15\]"),
        ({"ln_bias": torch.randn(16).double()}, "ln_bias must be float32"),
        ({"dropout_p": -0.5}, r"dropout_p must be in \[0, 1\)"),
        ({"dropout_p": 0.1, "rng": torch.zeros(2)}, "rng must be int64"),
    ],
)
def test_bad_input_is_named(backend: Backend, change: dict, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        ops.embedding_layer_norm(**backend.put(good_input() | change))


def good_input() -> dict[str, Tensor]:
    ids, params, _ = draw(3, 16, torch.float32, torch.float32)
    names = [*IDS, "word", "position", "token_type", "ln_weight", "ln_bias"]
    return dict(zip(names, [*ids, *params], strict=True))


@pytest.mark.backends("cuda")
@pytest.mark.parametrize("name", ["input_ids", "position", "rng"])
def test_another_device_is_named(backend: Backend, name: str) -> None:
    given = good_input() | {"rng": RNG}
    with pytest.raises(RuntimeError, match=f"{name} must be on the same device"):
        ops.embedding_layer_norm(**backend.put(given) | {name: given[name]}, dropout_p=0.1)


@pytest.mark.backends("cpu", "cuda")
def test_16_bit_tables_need_16_bit_activations(backend: Backend) -> None:
    ids, params, _ = backend.put(draw(3, 16, torch.bfloat16, torch.bfloat16))
    with pytest.raises(RuntimeError, match="word must be float32 or of the output's dtype"):
        ops.embedding_layer_norm(*ids, *params, out_dtype=torch.float32)
