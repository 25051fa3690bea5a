"""Checks that the tests of several operators share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from bert_unpad import _C, ops
from bert_unpad.batch import VarlenBatch
from tests.support import reference
from tests.support.processes import run_with

# The key of every test's dropout masks, where no other is asked for.
RNG = torch.tensor([123456789, 42])


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


def results_of_every_isa(compute: Callable[[], list[Tensor]]) -> dict[str, list[Tensor]]:
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


def assert_all_isas_agree(
    compute: Callable[[], list[Tensor]], fp32_units: int, low_units: int
) -> None:
    """Compares what each instruction set computes with the portable code's results.

    The units are of the dtype's eps times the largest value; of 16-bit types a few, because some
    instruction sets round attention weights once more.
    """
    results = results_of_every_isa(compute)
    first = results.pop("generic")
    for isa, tensors in results.items():
        for a, b in zip(first, tensors, strict=True):
            units = fp32_units if a.dtype == torch.float32 else low_units
            limit = units * torch.finfo(a.dtype).eps * a.abs().max().item()
            torch.testing.assert_close(a, b, atol=limit, rtol=0, msg=lambda m, i=isa: f"{i}: {m}")


def _compute_with(compute: Callable[[], list[Tensor]]) -> tuple[str, list[Tensor]]:
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


def compare_attention(
    dtype: torch.dtype,
    lengths: Sequence[int],
    *,
    heads: int = 2,
    head_dim: int = 64,
    p: float = 0.0,
    scale: float | None = None,
    device: str = "cpu",
) -> None:
    """Holds self-attention's result and gradient against the reference, on fresh random inputs."""
    total, rng = sum(lengths), RNG.to(device)
    qkv = torch.randn(total, 3, heads, head_dim, device=device).to(dtype)
    dout = torch.randn(total, heads, head_dim, device=device).to(dtype)
    batch = VarlenBatch.from_lengths(lengths, device)

    def ours() -> list[Tensor]:
        x = qkv.clone().requires_grad_()
        out = ops.varlen_attention(x, batch, dropout_p=p, scale=scale, rng=rng)
        out.backward(dout)
        return [out.detach(), x.grad]

    def plain(precision: torch.dtype) -> list[Tensor]:
        x = qkv.to(precision, copy=True).requires_grad_()
        out = reference.varlen_attention(x, lengths, p, rng, scale)
        out.backward(dout.to(precision))
        return [out.detach(), x.grad]

    reference.assert_as_good_as_pytorch(ours, plain, dtype, ["out", "dqkv"])


def compare_cross_attention(
    dtype: torch.dtype,
    q_lengths: Sequence[int],
    k_lengths: Sequence[int],
    *,
    heads: int = 2,
    head_dim: int = 64,
    p: float = 0.0,
    device: str = "cpu",
) -> None:
    """The same for queries and keys with lengths of their own."""
    rng = RNG.to(device)
    q = torch.randn(sum(q_lengths), heads, head_dim, device=device).to(dtype)
    kv = torch.randn(sum(k_lengths), 2, heads, head_dim, device=device).to(dtype)
    dout = torch.randn_like(q)
    cu = [cu_seqlens(lengths, device) for lengths in (q_lengths, k_lengths)]
    longest = max(q_lengths), max(k_lengths)

    def ours() -> list[Tensor]:
        a, b = q.clone().requires_grad_(), kv.clone().requires_grad_()
        out = ops.varlen_cross_attention(a, b, *cu, *longest, dropout_p=p, rng=rng)
        out.backward(dout)
        return [out.detach(), a.grad, b.grad]

    def plain(precision: torch.dtype) -> list[Tensor]:
        a, b = (x.to(precision, copy=True).requires_grad_() for x in (q, kv))
        out = reference.varlen_cross_attention(a, b, q_lengths, k_lengths, p, rng)
        out.backward(dout.to(precision))
        return [out.detach(), a.grad, b.grad]

    reference.assert_as_good_as_pytorch(ours, plain, dtype, ["out", "dq", "dkv"])
