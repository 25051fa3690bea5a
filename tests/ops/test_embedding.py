"""Embeddings + LayerNorm + dropout against the plain reference."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from bert_unpad import ops
from tests.support import reference
from tests.support.op_checks import (
    assert_compiles_to_the_same_bits,
    assert_same_bits_whatever_the_threads,
    embedding_ids,
    embedding_operands,
    results_of,
)
from tests.support.seeds import derived

RNG = torch.tensor([31415926, 2])
ENTRIES = (90, 20, 2)  # word, position, token type
NAMES = ["y", "dword", "dposition", "dtoken_type", "dln_weight", "dln_bias"]
draw_ids = partial(embedding_ids, ENTRIES)
draw = partial(embedding_operands, ENTRIES)


def compare(
    ids: list[Tensor], params: list[Tensor], dout: Tensor, p: float, eps: float = 1e-12
) -> None:
    dtype = dout.dtype

    def plain(precision: torch.dtype) -> list[Tensor]:
        # Plain PyTorch computes in the tables' dtype and converts at the end.
        return results_of(
            lambda *t: reference.embedding_layer_norm(*ids, *t, dropout_p=p, eps=eps, rng=RNG).to(
                torch.float64 if precision == torch.float64 else dtype
            ),
            params,
            dout,
            precision,
        )

    reference.assert_as_good_as_pytorch(
        lambda: results_of(
            lambda *t: ops.embedding_layer_norm(
                *ids, *t, dropout_p=p, eps=eps, out_dtype=dtype, rng=RNG
            ),
            params,
            dout,
        ),
        plain,
        dtype,
        NAMES,
    )


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("hidden", [3, 16, 100, 768])
@pytest.mark.parametrize(
    ("param_dtype", "out_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
    ],
    ids=str,
)
def test_matches_the_reference(
    param_dtype: torch.dtype, out_dtype: torch.dtype, hidden: int, p: float
) -> None:
    torch.manual_seed(derived(hidden))
    compare(*draw(70, hidden, param_dtype, out_dtype), p)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_fp32_tables_under_16_bit_activations(out_dtype: torch.dtype, p: float) -> None:
    torch.manual_seed(derived(0))
    ids, params, dout = draw(70, 100, torch.float32, out_dtype)
    y, *gradients = results_of(
        lambda *t: ops.embedding_layer_norm(*ids, *t, dropout_p=p, out_dtype=out_dtype, rng=RNG),
        params,
        dout,
    )
    truth, *true_gradients = results_of(
        lambda *t: reference.embedding_layer_norm(*ids, *t, dropout_p=p, rng=RNG),
        params,
        dout,
        torch.float64,
    )
    # One rounding of y, and none of the gradients.
    eps = torch.finfo(out_dtype).eps
    assert ((y - truth).abs() <= 0.51 * eps * truth.abs() + 1e-5).all()
    for name, a, b in zip(NAMES[1:], gradients, true_gradients, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).abs().max() <= 1e-5 * b.abs().max(), name


def test_words_with_very_many_tokens() -> None:
    torch.manual_seed(derived(1))
    compare(*draw(1500, 37, torch.float32, torch.float32), 0.1)


def test_words_that_do_not_occur_get_zeros() -> None:
    ids, params, dout = draw(50, 16, torch.float32, torch.float32)
    _, dword, dposition, *_ = results_of(
        lambda *t: ops.embedding_layer_norm(*ids, *t), params, dout
    )
    assert torch.equal(dword[80:], torch.zeros(10, 16))
    assert (dword[3] != 0).all()
    assert (dposition != 0).all()


def test_dropout_comes_after_the_layer_norm() -> None:
    # So that an output is either 0 or the scaled LayerNorm, and every row keeps its statistics.
    ids, params, _ = draw(200, 64, torch.float32, torch.float32)
    y = ops.embedding_layer_norm(*ids, *params, dropout_p=0.2, rng=RNG)
    plain = ops.embedding_layer_norm(*ids, *params)
    mask = reference.row_mask(RNG, 0.2, *y.shape)
    torch.testing.assert_close(y, plain * mask * reference.dropout_scale(0.2))


def test_output_is_in_the_tables_dtype_unless_told() -> None:
    ids, params, _ = draw(5, 16, torch.bfloat16, torch.bfloat16)
    assert ops.embedding_layer_norm(*ids, *params).dtype == torch.bfloat16


def test_no_tokens() -> None:
    ids, params, dout = draw(0, 16, torch.float32, torch.float32)
    y, *gradients = results_of(
        lambda *t: ops.embedding_layer_norm(*ids, *t, dropout_p=0.1), params, dout
    )
    assert y.shape == (0, 16)
    for gradient, param in zip(gradients, params, strict=True):
        assert torch.equal(gradient, torch.zeros_like(param))


def test_strided_ids() -> None:
    ids, params, _ = draw(30, 16, torch.float32, torch.float32)
    strided = [torch.stack([i, i], -1)[:, 0] for i in ids]
    assert torch.equal(
        ops.embedding_layer_norm(*ids, *params), ops.embedding_layer_norm(*strided, *params)
    )


def test_same_bits_whatever_the_threads() -> None:
    torch.manual_seed(derived(2))
    ids, params, dout = draw(1500, 48, torch.float32, torch.float32)
    assert_same_bits_whatever_the_threads(
        lambda: results_of(
            lambda *t: ops.embedding_layer_norm(*ids, *t, dropout_p=0.1, rng=RNG), params, dout
        )
    )


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_opcheck(p: float) -> None:
    ids, params, _ = draw(9, 20, torch.float32, torch.float32)
    leaves = [t.requires_grad_() for t in params]
    args = (*ids, *leaves, p, 1e-12, torch.bfloat16, RNG if p else None)
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": _ids(0, 90, 1)}, r"input_ids\[1\] = 90 is not in \[0, 90\), .* of word"),
        ({"input_ids": _ids(0, 1, -1)}, r"input_ids\[2\] = -1 is not in"),
        ({"position_ids": _ids(20, 0, 1)}, r"position_ids\[0\] = 20 is not in \[0, 20\)"),
        ({"token_type_ids": _ids(0, 0, 2)}, r"token_type_ids\[2\] = 2 is not in \[0, 2\)"),
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
def test_bad_input_is_named(change: dict, message: str) -> None:
    names = ["input_ids", "position_ids", "token_type_ids", "word", "position", "token_type"]
    names += ["ln_weight", "ln_bias"]
    ids, params, _ = draw(3, 16, torch.float32, torch.float32)
    good = dict(zip(names, [*ids, *params], strict=True))
    with pytest.raises(RuntimeError, match=message):
        ops.embedding_layer_norm(**(good | change))


def test_16_bit_tables_need_16_bit_activations() -> None:
    ids, params, _ = draw(3, 16, torch.bfloat16, torch.bfloat16)
    with pytest.raises(RuntimeError, match="word must be float32 or of the output's dtype"):
        ops.embedding_layer_norm(*ids, *params, out_dtype=torch.float32)
