"""Checks that the tests of several operators share."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from bert_unpad import _C
from tests.support.processes import run_with

T = TypeVar("T")
# The key of every test's dropout masks, where no other is asked for.
RNG = torch.tensor([123456789, 42])


def assert_same_numbers(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    """NaN may have other bits."""
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=0, equal_nan=True)


def cu_seqlens(lengths: Sequence[int], device: str = "cpu") -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def results_of(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Sequence[Tensor | None],
    dout: Tensor,
    precision: torch.dtype | None = None,
) -> list[Tensor]:
    """The function's first result and the gradients of its inputs.

    With a `precision` of float64 all inputs are given in it; otherwise activations (bf16, fp16)
    and parameters (fp32) go in as they are.
    """
    leaves = []
    for x in inputs:
        if x is None:
            leaves.append(None)
            continue
        wide = precision if precision == torch.float64 else x.dtype
        leaves.append(x.detach().to(wide).requires_grad_())  # an unaligned one stays where it is
    out = function(*leaves)
    first = out[0] if isinstance(out, tuple) else out
    first.backward(dout.to(first.dtype))
    return [first.detach(), *(x.grad for x in leaves if x is not None)]


def assert_same_bits_whatever_the_threads(run: Callable[[], Sequence[Tensor]]) -> None:
    """Runs with 1, 2 and 3 threads."""
    before = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(run())
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


def assert_compiles_to_the_same_bits(f: Callable[..., Tensor], leaves: Sequence[Tensor]) -> None:
    """Gradients of f, which gives a scalar, in one graph without breaks."""
    eager = torch.autograd.grad(f(*leaves), leaves)
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for a, b in zip(eager, torch.autograd.grad(compiled(*leaves), leaves), strict=True):
        assert torch.equal(a, b)


def results_of_every_isa(compute: Callable[[], T]) -> dict[str, T]:
    """What a function at the top level of a module returns, by instruction set; it is called for
    every one that this processor has, each in a process of its own."""
    built = _C.built_isas().split(",")
    isas = built[: built.index(_C.cpu_isa()) + 1]
    results = run_with([{"BERT_UNPAD_ISA": isa} for isa in isas], _compute_with, compute)
    found = {}
    for isa, (used, tensors) in zip(isas, results, strict=True):
        assert used == isa
        found[isa] = tensors
    return found


def _compute_with(compute: Callable[[], T]) -> tuple[str, T]:
    torch.set_num_threads(1)
    return _C.cpu_isa(), compute()


def embedding_ids(entries: Sequence[int], tokens: int) -> list[Tensor]:
    """Of words, positions and types. Half of the words are word 3, and the last ten do not
    occur."""
    words = torch.randint(entries[0] - 10, (tokens,))
    words[::2] = 3
    return [words, torch.arange(tokens) % entries[1], (torch.arange(tokens) % 7 > 3).long()]


def embedding_operands(
    entries: Sequence[int],
    tokens: int,
    hidden: int,
    table_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Ids; tables, LayerNorm weight and bias; and the gradient of y."""
    params = [torch.randn(n, hidden) for n in entries]
    params += [1 + 0.3 * torch.randn(hidden), torch.randn(hidden)]
    dy = torch.randn(tokens, hidden).to(out_dtype)
    return embedding_ids(entries, tokens), [t.to(table_dtype) for t in params], dy
