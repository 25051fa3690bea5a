"""embedding_layer_norm against the plain reference."""

from __future__ import annotations

import pytest
import reference
import torch
from torch import Tensor
from torch.library import opcheck

from bert_unpad import ops

RNG = torch.tensor([55, 66])
NAMES = ["y", "dword", "dposition", "dtoken_type", "dln_weight", "dln_bias"]


def make(tokens: int, hidden: int, vocab: int = 50) -> tuple[list[Tensor], list[Tensor]]:
    """Ids with many repeats, and tables and LayerNorm parameters."""
    ids = [torch.randint(0, n, (tokens,)) for n in (vocab, 12, 2)]
    tables = [torch.randn(n, hidden) for n in (vocab, 12, 2)]
    return ids, [*tables, torch.randn(hidden), torch.randn(hidden)]


def run(
    operator, ids: list[Tensor], parameters: list[Tensor], dy: Tensor, **kwargs
) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in parameters]
    y = operator(*ids, *leaves, **kwargs)
    y.backward(dy.to(y.dtype))
    return [y.detach(), *(t.grad for t in leaves)]


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("hidden", [5, 64, 200])
def test_matches_the_reference(hidden: int, p: float) -> None:
    torch.manual_seed(hidden)
    ids, parameters = make(300, hidden)
    dy = torch.randn(300, hidden)
    reference.assert_as_good_as_pytorch(
        lambda: run(ops.embedding_layer_norm, ids, parameters, dy, p=p, rng=RNG),
        lambda precision: run(
            reference.embedding_layer_norm,
            ids,
            [t.to(precision) for t in parameters],
            dy.to(precision),
            p=p,
            rng=RNG,
        ),
        torch.float32,
        NAMES,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_output_of_fp32_tables(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    ids, parameters = make(100, 96)
    dy = torch.randn(100, 96).to(dtype)

    def plain(precision: torch.dtype) -> list[Tensor]:
        def cast(*args: Tensor, **kwargs) -> Tensor:
            y = reference.embedding_layer_norm(*args, **kwargs)
            return y if precision == torch.float64 else y.to(precision)

        wide = [t.to(torch.float64 if precision == torch.float64 else torch.float32)
                for t in parameters]  # fmt: skip
        return run(cast, ids, wide, dy, p=0.1, rng=RNG)

    reference.assert_as_good_as_pytorch(
        lambda: run(ops.embedding_layer_norm, ids, parameters, dy, p=0.1, rng=RNG, out_dtype=dtype),
        plain,
        dtype,
        NAMES,
    )


def test_rows_without_tokens_get_zero_gradients() -> None:
    _, parameters = make(1, 16)
    ids = [torch.tensor([3, 3]), torch.tensor([0, 1]), torch.tensor([1, 1])]
    grads = run(ops.embedding_layer_norm, ids, parameters, torch.randn(2, 16))[1:]
    for table, used in zip(grads, ([3], [0, 1], [1]), strict=False):
        rows = table.abs().sum(1).nonzero().flatten().tolist()
        assert rows == used


def test_no_tokens_give_zero_gradients() -> None:
    ids, parameters = make(0, 16)
    y, *grads = run(ops.embedding_layer_norm, ids, parameters, torch.empty(0, 16))
    assert y.shape == (0, 16)
    assert all(torch.equal(g, torch.zeros_like(t)) for g, t in zip(grads, parameters, strict=True))


def test_same_bits_whatever_the_threads() -> None:
    torch.manual_seed(2)
    ids, parameters = make(700, 40)
    dy = torch.randn(700, 40)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(run(ops.embedding_layer_norm, ids, parameters, dy, p=0.1, rng=RNG))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_opcheck() -> None:
    ids, parameters = make(9, 24)
    leaves = [t.requires_grad_() for t in parameters]
    op = torch.ops.bert_unpad.embedding_layer_norm
    opcheck(op, (*ids, *leaves, 0.0, 1e-12, torch.float32, None))
    opcheck(op, (*ids, *leaves, 0.1, 1e-12, torch.bfloat16, RNG))


def test_compiles_without_graph_breaks() -> None:
    ids, parameters = make(9, 24)
    word = parameters[0].requires_grad_()

    def f(word: Tensor) -> Tensor:
        return ops.embedding_layer_norm(*ids, word, *parameters[1:], p=0.1, rng=RNG).square().sum()

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    (a,), (b,) = (torch.autograd.grad(g(word), word) for g in (f, compiled))
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, torch.tensor([0, 50]), r"input_ids\[1\] = 50"),
        (0, torch.tensor([-1, 0]), r"input_ids\[0\] = -1"),
        (1, torch.tensor([0, 12]), r"position_ids\[1\] = 12"),
        (2, torch.tensor([2, 0]), r"token_type_ids\[0\] = 2"),
        (0, torch.tensor([0, 1], dtype=torch.int32), "input_ids must be int64"),
        (1, torch.tensor([0]), "position_ids must have shape"),
        (3, torch.randn(50), "word must have shape"),
        (4, torch.randn(12, 9), "position must have shape"),
        (5, torch.randn(2, 8).half(), "token_type must have the dtype of word"),
        (6, torch.randn(9), "weight must have shape"),
    ],
)
def test_bad_input_is_named(index: int, value: Tensor, message: str) -> None:
    ids, parameters = make(2, 8)
    args = [*ids, *parameters]
    args[index] = value
    with pytest.raises(ValueError, match=message):
        ops.embedding_layer_norm(*args)
