"""embedding_layer_norm on a GPU: values, table gradients, masks, calls and errors."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from bert_unpad import ops
from tests.support import reference
from tests.support.cuda_checks import (
    DTYPES,
    GPU_ONLY,
    assert_graph_takes_new_values,
    assert_runs_on_the_current_stream,
    assert_same_bits,
)
from tests.support.op_checks import RNG, results_of
from tests.support.seeds import derived

pytestmark = GPU_ONLY

ENTRIES = (30522, 512, 2)  # word, position, token type
NAMES = ["y", "dword", "dposition", "dtoken_type", "dweight", "dbias"]


def draw(tokens: int, hidden: int, table_dtype: torch.dtype, out_dtype: torch.dtype):
    """Ids; tables, LayerNorm weight and bias; and the gradient of y. A tenth of the words is 3."""
    words = torch.randint(ENTRIES[0], (tokens,), device="cuda")
    words[::10] = 3
    positions = torch.arange(tokens, device="cuda")
    ids = [words, positions % ENTRIES[1], (positions % 7 > 3).long()]
    params = [torch.randn(n, hidden, device="cuda") for n in ENTRIES]
    params += [
        1 + 0.3 * torch.randn(hidden, device="cuda"),
        torch.randn(hidden, device="cuda"),
    ]
    dy = torch.randn(tokens, hidden, device="cuda").to(out_dtype)
    return ids, [t.to(table_dtype) for t in params], dy


def run(ids: list[Tensor], params: list[Tensor], dy: Tensor, p: float) -> list[Tensor]:
    rng = RNG.cuda()
    return results_of(
        lambda *t: ops.embedding_layer_norm(*ids, *t, dropout_p=p, out_dtype=dy.dtype, rng=rng),
        params,
        dy,
    )


def truth(ids, params, dy, p, precision=torch.float64) -> list[Tensor]:
    def plain(*t: Tensor) -> Tensor:
        y = reference.embedding_layer_norm(*ids, *t)
        if p > 0.0:
            y = y * reference.row_mask(RNG, p, *y.shape).cuda() * reference.dropout_scale(p)
        return y

    return results_of(plain, params, dy, precision)


def compare(ids: list[Tensor], params: list[Tensor], dy: Tensor, p: float) -> None:
    reference.assert_as_good_as_pytorch(
        lambda: run(ids, params, dy, p),
        lambda precision: truth(ids, params, dy, p, precision),
        dy.dtype,
        NAMES,
    )


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "hidden"),
    [
        *[(0, 768), (1, 3), (1000, 7), (5000, 64), (3000, 256), (13_000, 768), (9001, 1000)],
        *[(20_000, 1024), (300, 4096), (50, 4100)],
    ],
)
def test_matches_the_reference(tokens: int, hidden: int, dtype: torch.dtype, p: float) -> None:
    torch.manual_seed(derived(0))
    compare(*draw(tokens, hidden, dtype, dtype), p)


@pytest.mark.sanitizer
@pytest.mark.parametrize("hidden", [13, 128, 264, 768])
def test_few_tokens(hidden: int) -> None:
    torch.manual_seed(derived(1))
    compare(*draw(300, hidden, torch.float32, torch.float32), 0.1)


@pytest.mark.sanitizer
@pytest.mark.parametrize("hidden", [13, 768])
@pytest.mark.parametrize("out_dtype", DTYPES[1:])
def test_fp32_tables_under_16_bit_activations(out_dtype: torch.dtype, hidden: int) -> None:
    torch.manual_seed(derived(2))
    ids, params, dy = draw(700, hidden, torch.float32, out_dtype)
    for name, got, t in zip(
        NAMES, run(ids, params, dy, 0.1), truth(ids, params, dy, 0.1), strict=True
    ):
        # One rounding of y, and none of the gradients.
        eps = torch.finfo(got.dtype).eps if name == "y" else 0.0
        assert got.dtype == (out_dtype if name == "y" else torch.float32)
        assert ((got - t).abs() <= 0.51 * eps * t.abs() + 1e-5 * t.abs().max()).all(), name


def test_all_tokens_the_same() -> None:
    torch.manual_seed(derived(3))
    ids, params, dy = draw(30_000, 64, torch.float32, torch.float32)
    compare([torch.full_like(x, 1) for x in ids], params, dy, 0.0)


def test_masks_are_those_of_the_cpu_operator() -> None:
    torch.manual_seed(derived(4))
    ids, params, dy = draw(500, 768, torch.float32, torch.float32)
    got = run(ids, params, dy, 0.1)[0].cpu()
    want = ops.embedding_layer_norm(
        *(x.cpu() for x in ids), *(x.cpu() for x in params), dropout_p=0.1, rng=RNG
    )
    assert torch.equal(got == 0, want == 0)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("hidden", [13, 1024])
def test_same_bits_every_time(hidden: int) -> None:
    torch.manual_seed(derived(5))
    ids, params, dy = draw(13_001, hidden, torch.float32, torch.bfloat16)
    first = run(ids, params, dy, 0.1)
    for _ in range(5):
        assert_same_bits(run(ids, params, dy, 0.1), first)


def test_runs_on_the_current_stream() -> None:
    torch.manual_seed(derived(6))
    ids, params, dy = draw(2000, 768, torch.float32, torch.bfloat16)
    assert_runs_on_the_current_stream(lambda w: run([w, *ids[1:]], params, dy, 0.0), ids[0])


def test_graphs_take_new_ids_and_masks() -> None:
    torch.manual_seed(derived(7))
    ids, params, dy = draw(2000, 768, torch.float32, torch.bfloat16)
    rng, op = RNG.cuda(), torch.ops.bert_unpad

    def both() -> list[Tensor]:
        y, mean, rstd = op.embedding_layer_norm(
            *ids, *params, 0.1, 1e-12, torch.bfloat16, rng
        )  # fmt: skip
        gradients = op.embedding_layer_norm_backward(
            dy, *ids, *params[:4], mean, rstd, 0.1, rng
        )  # fmt: skip
        return [y, *gradients]

    assert_graph_takes_new_values(both, lambda: rng.add_(1))
    assert_graph_takes_new_values(both, lambda: ids[0].copy_(ids[0].flip(0)))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_runs_on_the_device_of_its_tensors() -> None:
    ids, params, _ = draw(100, 768, torch.float32, torch.float32)
    there = [x.to("cuda:1") for x in (*ids, *params)]
    want = ops.embedding_layer_norm(*ids, *params)
    assert torch.equal(ops.embedding_layer_norm(*there).cpu(), want.cpu())


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_opcheck(p: float) -> None:
    ids, params, _ = draw(9, 24, torch.float32, torch.float32)
    leaves = [t.requires_grad_() for t in params]
    args = (*ids, *leaves, p, 1e-12, torch.bfloat16, RNG.cuda() if p else None)
    opcheck(torch.ops.bert_unpad.embedding_layer_norm, args)


# Values are functions, so that the file can be read where there is no GPU.
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {"input_ids": t["input_ids"].int()}, "input_ids must be int64"),
        (lambda t: {"input_ids": t["input_ids"].cpu()}, "input_ids must be on the same device"),
        (lambda t: {"token_type_ids": t["input_ids"][:2]}, "token_type_ids must have shape"),
        (lambda t: {"word": t["word"].double()}, "must be float32, bfloat16 or float16"),
        (lambda t: {"position": t["position"].cpu()}, "position must be on the same device"),
        (lambda t: {"position": t["position"].half()}, "position must have the dtype of word"),
        (lambda t: {"ln_bias": t["ln_bias"][:-1]}, r"ln_bias must have shape \[16\]"),
        (lambda t: {"dropout_p": -0.5}, r"dropout_p must be in \[0, 1\)"),
        (lambda t: {"dropout_p": 0.1, "rng": RNG}, "rng must be on the same device"),
    ],
)
def test_bad_input_is_named(change, message: str) -> None:
    ids, params, _ = draw(3, 16, torch.float32, torch.float32)
    names = ["input_ids", "position_ids", "token_type_ids", "word", "position", "token_type"]
    good = dict(zip([*names, "ln_weight", "ln_bias"], [*ids, *params], strict=True))
    with pytest.raises(RuntimeError, match=message):
        ops.embedding_layer_norm(**(good | change(good)))


@pytest.mark.parametrize("table", ["input_ids", "position_ids", "token_type_ids"])
@pytest.mark.parametrize("wrong", [-1, 2**32])
def test_ids_out_of_range_stop_the_kernel(table: str, wrong: int) -> None:
    """In its own process: the CUDA context does not survive it."""
    code = f"""
import torch
from bert_unpad import ops
ids = {{n: torch.zeros(3, dtype=torch.int64, device="cuda")
       for n in ("input_ids", "position_ids", "token_type_ids")}}
ids["{table}"][1] = {wrong}
rows = torch.randn(2, 16, device="cuda")
tables = dict(word=rows, position=rows, token_type=rows, ln_weight=rows[0], ln_bias=rows[0])
ops.embedding_layer_norm(**ids, **tables)
torch.cuda.synchronize()
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.returncode != 0
    assert f"{table} must be in [0, entries of" in out.stderr
    assert "device-side assert" in out.stderr


@pytest.mark.large(32)
def test_more_than_2_to_the_31_elements() -> None:
    tokens, hidden = 2**21 + 5, 1024
    ids, params, dy = draw(tokens, hidden, torch.float32, torch.bfloat16)
    dy[:-5] = 0
    got, few = run(ids, params, dy, 0.0), [x[-5:].clone() for x in ids]
    want = run(few, params, dy[-5:].clone(), 0.0)
    assert torch.equal(got[0][-5:], want[0])
    for a, b in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
