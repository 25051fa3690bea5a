"""Variable-length attention on a GPU: values, dropout masks, and that bits repeat.

Values are held against float64 by the rule of tests/support/reference.py, dropout masks against the
CPU's bit for bit. How the operators are called is in test_attention_calls.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bert_unpad import ops
from bert_unpad.batch import VarlenBatch
from tests.support import reference
from tests.support.cuda_attention import (
    FULL,
    LENGTHS,
    SCHEDULES,
    heads_for,
    kernels,  # noqa: F401 (a fixture)
    random_qkv,
    results,
)
from tests.support.cuda_checks import DTYPES, GPU_ONLY, assert_same_bits
from tests.support.op_checks import RNG, compare_attention, compare_cross_attention, cu_seqlens
from tests.support.seeds import derived

pytestmark = GPU_ONLY


@pytest.mark.usefixtures("kernels")
@FULL
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_the_reference(dtype: torch.dtype, head_dim: int, p: float, full: bool) -> None:
    torch.manual_seed(derived(0))
    heads = heads_for(len(LENGTHS), full)
    compare_attention(dtype, LENGTHS, heads=heads, head_dim=head_dim, p=p, device="cuda")


@pytest.mark.usefixtures("kernels")
@pytest.mark.sanitizer
@FULL
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_small_batches_of_all_kinds(
    dtype: torch.dtype, head_dim: int, p: float, full: bool
) -> None:
    torch.manual_seed(derived(1))
    heads, lengths = heads_for(4, full), [70, 0, 1, 129]
    compare_attention(dtype, lengths, heads=heads, head_dim=head_dim, p=p, device="cuda")


@pytest.mark.parametrize("lengths", [[1], [16], [64], [513, 1], [1] * 70, [0, 0, 3]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_batches(dtype: torch.dtype, lengths: list[int]) -> None:
    torch.manual_seed(derived(1))
    compare_attention(dtype, lengths, heads=3, p=0.1, device="cuda")


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [[8192], [3, 8192, 0, 700, 130]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_sequences(dtype: torch.dtype, lengths: list[int]) -> None:
    torch.manual_seed(derived(2))
    compare_attention(dtype, lengths, heads=1, device="cuda")


@pytest.mark.parametrize("scale", [0.7, -0.3])
def test_scale_is_applied_before_the_softmax(scale: float) -> None:
    torch.manual_seed(derived(3))
    compare_attention(torch.float32, [40, 3, 130], scale=scale, device="cuda")


@pytest.mark.usefixtures("kernels")
@pytest.mark.sanitizer
@FULL
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_attention(dtype: torch.dtype, head_dim: int, full: bool) -> None:
    torch.manual_seed(derived(4))
    q_lengths, k_lengths = [3, 0, 40, 17, 0, 77, 130], [70, 5, 33, 129, 0, 512, 200]
    options = {"heads": heads_for(7, full), "head_dim": head_dim, "device": "cuda"}
    compare_cross_attention(dtype, q_lengths, k_lengths, p=0.1, **options)


def test_cross_attention_takes_an_order() -> None:
    torch.manual_seed(derived(5))
    keys = VarlenBatch.from_lengths([70, 5, 0, 300], "cuda")
    q = torch.randn(12, 2, 64, device="cuda", dtype=torch.bfloat16)
    kv = torch.randn(keys.total, 2, 2, 64, device="cuda", dtype=torch.bfloat16)
    args = (q, kv, cu_seqlens([4, 1, 3, 4], "cuda"), keys.cu_seqlens, 4, 300)
    expected = ops.varlen_cross_attention(*args)
    assert torch.equal(ops.varlen_cross_attention(*args, order=keys.order), expected)


@pytest.mark.sanitizer
def test_queries_without_keys_give_zeros() -> None:
    q = torch.randn(3, 2, 64, device="cuda", requires_grad=True)
    kv = torch.randn(4, 2, 2, 64, device="cuda", requires_grad=True)
    cu = cu_seqlens([2, 1], "cuda"), cu_seqlens([0, 4], "cuda")
    out = ops.varlen_cross_attention(q, kv, *cu, 2, 4)
    out.sum().backward()
    assert torch.equal(out[:2], torch.zeros_like(out[:2]))
    assert torch.equal(q.grad[:2], torch.zeros_like(q.grad[:2]))
    assert out[2:].abs().sum() > 0
    assert torch.isfinite(kv.grad).all()


@pytest.mark.sanitizer
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_batches_without_tokens(lengths: list[int], schedule: str) -> None:
    qkv, dout = random_qkv([], torch.bfloat16)
    batch = VarlenBatch.from_lengths(lengths, "cuda")
    out, dqkv = results(qkv, dout, batch, schedule=schedule)
    torch.cuda.synchronize()
    assert out.shape == (0, 2, 64)
    assert dqkv.shape == qkv.shape


def kept_weights(
    lengths: list[int], heads: int, dtype: torch.dtype, device: str, p: float
) -> list[Tensor]:
    """Which weights [heads, rows, columns] of each sequence the passes keep, forward and backward.

    With q = k = 0 all weights of a row are equal. Where v (or dout) is 1 in column d of row
    first + d alone, out (or dv) has a nonzero in column d where that key's (query's) weight is
    kept.
    """
    dim = 64
    batch = VarlenBatch.from_lengths(lengths, device)
    cu = batch.cu_seqlens_host.tolist()
    kept = [torch.zeros(2, heads, n, n, dtype=torch.bool) for n in lengths]
    for first in range(0, max(lengths), dim):
        one_hot = torch.zeros(batch.total, heads, dim)
        for begin, n in zip(cu, lengths, strict=False):
            for d in range(min(dim, n - first)):
                one_hot[begin + first + d, :, d] = 1.0
        one_hot = one_hot.to(device, dtype)
        qkv = torch.stack([torch.zeros_like(one_hot)] * 2 + [one_hot], 1)
        out, dqkv = results(qkv, one_hot, batch, p=p)
        for mask, begin, n in zip(kept, cu, lengths, strict=False):
            columns = mask[..., first : first + dim], mask[..., first : first + dim, :]
            width = columns[0].shape[-1]
            forward = out[begin : begin + n, :, :width].cpu() != 0
            backward = dqkv[begin : begin + n, 2, :, :width].cpu() != 0
            columns[0][0] = forward.transpose(0, 1)
            columns[1][1] = backward.permute(1, 2, 0)
    return kept


@pytest.mark.usefixtures("kernels")
@FULL
@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_masks_are_those_of_the_cpu(dtype: torch.dtype, p: float, full: bool) -> None:
    lengths = [129, 0, 1, 17, 64, 200]
    heads = heads_for(len(lengths), full)
    on_gpu, on_cpu = (kept_weights(lengths, heads, dtype, device, p) for device in ("cuda", "cpu"))
    for sequence, (gpu, cpu) in enumerate(zip(on_gpu, on_cpu, strict=True)):
        n = lengths[sequence]
        assert torch.equal(gpu, cpu), f"sequence {sequence}"
        for head in range(heads):
            expected = reference.attention_mask(RNG, p, sequence * heads + head, n, n)
            assert torch.equal(gpu[0, head], expected), f"sequence {sequence}, head {head}"


@pytest.mark.usefixtures("kernels")
@pytest.mark.sanitizer
@FULL
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_schedule_changes_no_bit(dtype: torch.dtype, full: bool) -> None:
    torch.manual_seed(derived(6))
    qkv, dout = random_qkv(LENGTHS, dtype, heads_for(len(LENGTHS), full))
    batch = VarlenBatch.from_lengths(LENGTHS, "cuda")
    assert len(batch.groups) > 1
    expected = results(qkv, dout, batch.cu_seqlens, batch.max_seqlen)
    for schedule in SCHEDULES:
        assert_same_bits(results(qkv, dout, batch, schedule=schedule), expected)


@pytest.mark.usefixtures("kernels")
@FULL
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_every_time(dtype: torch.dtype, schedule: str, full: bool) -> None:
    torch.manual_seed(derived(7))
    qkv, dout = random_qkv(LENGTHS * 3, dtype, heads_for(3 * len(LENGTHS), full))
    batch = VarlenBatch.from_lengths(LENGTHS * 3, "cuda")
    first = results(qkv, dout, batch, schedule=schedule)
    for _ in range(5):
        assert_same_bits(results(qkv, dout, batch, schedule=schedule), first)


@pytest.mark.sanitizer
@FULL
@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_input_and_gradient(dtype: torch.dtype, full: bool) -> None:
    torch.manual_seed(derived(8))
    heads = heads_for(2, full)
    # Heads before q, k, v, and only 64 of 96 columns used.
    qkv = torch.randn(230, heads, 3, 96, device="cuda").to(dtype).transpose(1, 2)[..., :64]
    dout = torch.randn(230, 64, heads, device="cuda").to(dtype).transpose(1, 2)
    assert not qkv.is_contiguous()
    assert dout.stride(-1) != 1
    batch = VarlenBatch.from_lengths([200, 30], "cuda")
    assert_same_bits(results(qkv, dout, batch), results(qkv.contiguous(), dout.contiguous(), batch))


def test_large_scores_stay_finite() -> None:
    torch.manual_seed(derived(9))
    qkv = torch.randn(150, 3, 1, 64, device="cuda") * 100
    out = ops.varlen_attention(qkv, VarlenBatch.from_lengths([150], "cuda"))
    expected = reference.varlen_attention(qkv.double(), [150])
    torch.testing.assert_close(out.double(), expected, atol=1e-2, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("part", [0, 1, 2])
def test_nan_comes_out_as_nan(part: int, dtype: torch.dtype) -> None:
    qkv = torch.randn(140, 3, 1, 64, device="cuda").to(dtype)
    qkv[7, part, 0, 3] = float("nan")
    out = ops.varlen_attention(qkv, VarlenBatch.from_lengths([70, 70], "cuda"))
    expected = reference.varlen_attention(qkv.double(), [70, 70]).isnan()
    assert torch.equal(out.isnan(), expected)
    assert expected.any()


@pytest.mark.large(24)
def test_more_than_2_to_the_31_elements() -> None:
    heads, head_dim, length, sequences = 16, 64, 128, 5500
    assert length * sequences * 3 * heads * head_dim > 2**31
    torch.manual_seed(derived(13))
    qkv, dout = random_qkv([length], torch.bfloat16, heads)

    def last_of(count: int) -> list[Tensor]:
        """Results of a batch of zeros but for its last sequence, and whether others are zeros."""
        many = qkv.new_zeros(length * count, 3, heads, head_dim)
        many_dout = dout.new_zeros(length * count, heads, head_dim)
        many[-length:], many_dout[-length:] = qkv, dout
        batch = VarlenBatch.from_lengths([length] * count, "cuda")
        found = results(many, many_dout, batch, p=0.0)
        assert not any(x[:-length].any() for x in found)
        return [x[-length:].clone() for x in found]

    assert_same_bits(last_of(sequences), last_of(64))
