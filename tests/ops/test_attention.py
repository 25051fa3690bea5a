"""Variable-length attention: values against the reference, dropout masks, and that bits repeat."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from bert_unpad import ops
from bert_unpad.batch import VarlenBatch
from tests.support import reference
from tests.support.attention_cases import DTYPES, MODELS, Case, Kernels, compare, kinds
from tests.support.attention_cases import with_gradients as results_of
from tests.support.backends import Backend
from tests.support.op_checks import RNG, cu_seqlens
from tests.support.seeds import derived

CPU, CUDA = pytest.mark.backends("cpu"), pytest.mark.backends("cuda")
ALL_KERNELS = kinds("fused", "split", "wgmma_fused", "wgmma_split")
# One of each dtype that is computed in another way.
FP32_AND_BF16 = {"dtypes": DTYPES[:2]}


def lengths_for(backend: Backend, dtype: torch.dtype) -> list[int]:
    """Around the edges of tiles (of 16 and 64 rows; on a GPU in fp32 of 16 and 32), and of
    blocks."""
    if backend.name == "cuda":
        return [200, 0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 511, 512, 513]
    if backend.name in MODELS and dtype == torch.float32:
        return [70, 0, 1, 15, 16, 17, 31, 32, 33]
    return [200, 0, 1, 15, 16, 17, 63, 64, 65, 129]


def several_tiles(backend: Backend, dtype: torch.dtype) -> int:
    """Tokens of as many tiles as make a difference."""
    return 70 if backend.name in MODELS and dtype == torch.float32 else 130


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5])
@ALL_KERNELS
def test_matches_the_reference(
    backend: Backend, kernels: Kernels, dtype: torch.dtype, p: float
) -> None:
    torch.manual_seed(derived(0))
    lengths = lengths_for(backend, dtype)
    compare(Case(lengths, heads=kernels.heads(len(lengths)), p=p), dtype, backend.device)


@pytest.mark.sanitizer
@pytest.mark.parametrize("p", [0.1, pytest.param(0.0, marks=CUDA)])
@pytest.mark.parametrize(
    "head_dim", [32, 96, 128, *(pytest.param(n, marks=CPU) for n in (1, 5, 100, 200, 256))]
)
@kinds("fused", "split")
def test_any_head_dim(
    backend: Backend, kernels: Kernels, dtype: torch.dtype, head_dim: int, p: float
) -> None:
    torch.manual_seed(derived(head_dim))
    lengths = [33, 0, several_tiles(backend, dtype), 5]
    case = Case(lengths, heads=kernels.heads(4), head_dim=head_dim, p=p)
    compare(case, dtype, backend.device)


@pytest.mark.sanitizer
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case([200, 0, 1, 15, 16, 17, 64, 65, 129]), id="two_warpgroups"),
        pytest.param(Case([129, 0, 64, 65, 192], scale=-0.3), id="one_warpgroup"),
        pytest.param(Case([70, 5, 33, 129], [3, 0, 40, 230]), id="queries_and_keys"),
        pytest.param(Case([200, 3], heads=2, kv_heads=1), id="grouped_heads"),
        pytest.param(Case([200, 3, 0], window=(20, 70)), id="window"),
    ],
)
@kinds("wgmma_split", dtypes=DTYPES[1:])
def test_head_dim_128_with_wgmma(
    backend: Backend, kernels: Kernels, dtype: torch.dtype, case: Case, p: float
) -> None:
    torch.manual_seed(derived(12))
    compare(replace(case, head_dim=128, p=p), dtype, backend.device)


@pytest.mark.parametrize("lengths", [[1], [16], [64], [1] * 9, [0, 0, 3]], ids=str)
@kinds("fused", "wgmma_fused", **FP32_AND_BF16)
def test_small_batches(
    backend: Backend, kernels: Kernels, dtype: torch.dtype, lengths: list[int]
) -> None:
    torch.manual_seed(derived(1))
    compare(Case(lengths, heads=3, p=0.1), dtype, backend.device)


# Around tiles of 64 and 128, and parts of 512.
@pytest.mark.parametrize(
    "lengths",
    [[127, 128, 129], [191, 192, 193], [449], [512], pytest.param([511, 513], marks=CPU)],
    ids=str,
)
@kinds("fused", "split", "wgmma_fused", dtypes=[torch.bfloat16])
def test_lengths_of_several_tiles(
    backend: Backend, kernels: Kernels, dtype: torch.dtype, lengths: list[int]
) -> None:
    torch.manual_seed(derived(1))
    compare(Case(lengths, heads=1, p=0.1), dtype, backend.device)


@pytest.mark.parametrize("p", [0.0, 0.1])
@kinds("fused", "split", dtypes=[torch.bfloat16])
def test_a_last_tile_of_every_size(
    backend: Backend, kernels: Kernels, dtype: torch.dtype, p: float
) -> None:
    """Of keys (after a full one) and of queries, beside few of the others."""
    torch.manual_seed(derived(11))
    sizes = list(range(64, 129))
    for few, many in (([17] * 65, sizes), (sizes, [17] * 65)):
        compare(Case(many, few, heads=1, head_dim=32, p=p), dtype, backend.device)


@pytest.mark.parametrize("scale", [0.7, -0.3])
@kinds("fused", "wgmma_fused", "wgmma_split", **FP32_AND_BF16)
def test_scale_is_applied_before_the_softmax(
    backend: Backend, kernels: Kernels, dtype: torch.dtype, scale: float
) -> None:
    torch.manual_seed(derived(2))
    compare(Case([70, 12], scale=scale), dtype, backend.device)


@pytest.mark.parametrize(
    ("lengths", "head_dim"),
    [
        # Longer than one strip of scores allows: the smallest block of rows.
        pytest.param([4100], 8, marks=CPU),
        pytest.param([8192], 64, marks=[CUDA, pytest.mark.slow]),
        pytest.param([3, 8192, 0, 700, 130], 64, marks=[CUDA, pytest.mark.slow]),
    ],
)
@kinds("fused", "wgmma_fused")
def test_long_sequences(
    backend: Backend, kernels: Kernels, dtype: torch.dtype, lengths: list[int], head_dim: int
) -> None:
    torch.manual_seed(derived(3))
    compare(Case(lengths, heads=1, head_dim=head_dim), dtype, backend.device)


@pytest.mark.sanitizer
@pytest.mark.parametrize("head_dim", [64, *(pytest.param(n, marks=CUDA) for n in (32, 96, 128))])
@ALL_KERNELS
def test_queries_and_keys_of_different_lengths(
    backend: Backend, kernels: Kernels, dtype: torch.dtype, head_dim: int
) -> None:
    torch.manual_seed(derived(4))
    q_lengths, k_lengths = [3, 0, 40, 17, 0, 80, 130], [70, 5, 33, 129, 0, 20, 65]
    if backend.name in MODELS and dtype == torch.float32:
        q_lengths, k_lengths = q_lengths[:-1], k_lengths[:-1]
    heads = kernels.heads(len(q_lengths))
    case = Case(k_lengths, q_lengths, heads=heads, head_dim=head_dim, p=0.1)
    compare(case, dtype, backend.device)


@pytest.mark.sanitizer
@kinds("fused", "split", "wgmma_fused", "wgmma_split", **FP32_AND_BF16)
def test_queries_without_keys_and_keys_without_queries(
    backend: Backend, kernels: Kernels, dtype: torch.dtype
) -> None:
    case = Case([0, 4], [5, 0])
    inputs = backend.put(case.inputs(dtype))
    for x in results_of(case.ours, inputs, backend.put(case.dout(dtype))):
        assert torch.equal(x, torch.zeros_like(x))
    cu_q, cu_k = cu_seqlens([5, 5], backend.device), cu_seqlens([0, 4], backend.device)
    q = torch.cat([inputs["q"]] * 2)
    lengths = (cu_q, cu_k, 5, 4, 1.0, 0.0, None)
    out, lse = torch.ops.bert_unpad.varlen_cross_attention(q, inputs["kv"], *lengths)
    assert (lse[:, :5] == -torch.inf).all()
    assert lse[:, 5:].isfinite().all()
    assert not out[:5].any()
    assert out[5:].any()


@pytest.mark.sanitizer
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("schedule", ["list", "groups"])
def test_batches_without_tokens(backend: Backend, lengths: list[int], schedule: str) -> None:
    batch = VarlenBatch.from_lengths(lengths, backend.device)
    qkv = torch.randn(0, 3, 2, 64, dtype=torch.bfloat16, device=backend.device, requires_grad=True)
    out = ops.varlen_attention(qkv, batch, schedule=schedule)
    out.sum().backward()
    assert out.shape == (0, 2, 64)
    assert qkv.grad.shape == qkv.shape


@pytest.mark.sanitizer
@kinds("fused", "split", "wgmma_fused", "wgmma_split", **FP32_AND_BF16)
def test_strided_input_and_gradient(backend: Backend, kernels: Kernels, dtype: torch.dtype) -> None:
    torch.manual_seed(derived(5))
    case = Case([65, 20], heads=kernels.heads(2), p=0.1)
    # Heads before q, k, v, and only 64 of 96 columns used; a gradient in another order.
    qkv = torch.randn(85, case.heads, 3, 96).to(dtype).transpose(1, 2)[..., :64]
    dout = torch.randn(85, 64, case.heads).to(dtype).transpose(1, 2)
    assert not qkv.is_contiguous()
    assert dout.stride(-1) != 1
    qkv, dout = backend.put((qkv, dout))
    strided = results_of(case.ours, {"qkv": qkv}, dout)
    plain = results_of(case.ours, {"qkv": qkv.contiguous()}, dout.contiguous())
    for a, b in zip(strided, plain, strict=True):
        assert torch.equal(a, b)


# A GPU's 16-bit kernels subtract the maximum before a score is rounded, which 1e12 is too much for.
@pytest.mark.parametrize("factor", [100, pytest.param(1e6, marks=CPU)])
@kinds("fused", "wgmma_fused", **FP32_AND_BF16)
def test_large_scores_stay_finite(
    backend: Backend, kernels: Kernels, dtype: torch.dtype, factor: float
) -> None:
    qkv = torch.randn(50, 3, 1, 64)
    qkv[:, :2] *= factor
    qkv = backend.put(qkv.to(dtype))
    out = ops.varlen_attention(qkv, VarlenBatch.from_lengths([50], backend.device))
    q, k, v = qkv.double()[:, :, 0].unbind(1)
    scores = q @ k.T / 8
    expected = scores.softmax(-1) @ v
    # A score is a sum of 64 products in fp32. Its rounding moves the result between the values of
    # keys whose weights are alike, and hardly where one key has all the weight.
    rounding = 128 * torch.finfo(torch.float32).eps * (q.abs() @ k.abs().T / 8).amax(-1, True)
    most = (scores - scores.amax(-1, True) + rounding).clamp(max=0).exp()  # of a key's weight
    moved = (-torch.expm1(-rounding) * most)[:, :, None] * (v - expected[:, None]).abs()
    limit = 4 * torch.finfo(dtype).eps * v.abs().max() + 1e-6
    assert ((out.double()[:, 0] - expected).abs() <= limit + moved.sum(1)).all()


@pytest.mark.parametrize("part", [0, 1, 2])
@kinds("fused", "wgmma_fused")
def test_nan_comes_out_as_nan(
    backend: Backend, kernels: Kernels, dtype: torch.dtype, part: int
) -> None:
    qkv = torch.randn(90, 3, 1, 64).to(dtype)
    qkv[7, part, 0, 3] = float("nan")
    batch = VarlenBatch.from_lengths([70, 20], backend.device)
    out = ops.varlen_attention(backend.put(qkv), batch)
    # PyTorch's products of bf16 by AMX tiles spread NaN to a row beside.
    expected = reference.varlen_attention(qkv.double(), [70, 20]).isnan()
    assert torch.equal(out.isnan().cpu(), expected)
    assert expected.any()


def kept_weights(
    backend: Backend, lengths: list[int], heads: int, dtype: torch.dtype, p: float
) -> list[Tensor]:
    """Which weights [heads, rows, columns] of each sequence the passes keep, forward and backward.

    With q = k = 0 all weights of a row are equal. Where v (or dout) is 1 in column d of row
    first + d alone, out (or dv) has a nonzero in column d where that key's (query's) weight is
    kept.
    """
    dim, case = 64, Case(lengths, heads=heads, p=p)
    begins = cu_seqlens(lengths).tolist()
    kept = [torch.zeros(2, heads, n, n, dtype=torch.bool) for n in lengths]
    for first in range(0, max(lengths), dim):
        one_hot = torch.zeros(sum(lengths), heads, dim, dtype=dtype)
        for begin, n in zip(begins, lengths, strict=False):
            for d in range(min(dim, n - first)):
                one_hot[begin + first + d, :, d] = 1.0
        qkv = torch.stack([torch.zeros_like(one_hot)] * 2 + [one_hot], 1)
        out, dqkv = results_of(case.ours, {"qkv": backend.put(qkv)}, backend.put(one_hot))
        for mask, begin, n in zip(kept, begins, lengths, strict=False):
            columns = mask[..., first : first + dim], mask[..., first : first + dim, :]
            width = columns[0].shape[-1]
            forward = out[begin : begin + n, :, :width].cpu() != 0
            backward = dqkv[begin : begin + n, 2, :, :width].cpu() != 0
            columns[0][0] = forward.transpose(0, 1)
            columns[1][1] = backward.permute(1, 2, 0)
    return kept


@pytest.mark.parametrize("p", [0.1, 0.99])
@ALL_KERNELS
def test_dropout_masks_are_those_of_the_reference(
    backend: Backend, kernels: Kernels, dtype: torch.dtype, p: float
) -> None:
    lengths = [several_tiles(backend, dtype), 0, 1, 33]
    heads = kernels.heads(len(lengths))
    for sequence, kept in enumerate(kept_weights(backend, lengths, heads, dtype, p)):
        for head, n in ((head, lengths[sequence]) for head in range(heads)):
            expected = reference.attention_mask(RNG, p, sequence * heads + head, n, n)
            assert torch.equal(kept[0, head], expected), f"sequence {sequence}, head {head}"
            assert torch.equal(kept[1, head], expected), f"sequence {sequence}, head {head}"


@pytest.mark.sanitizer
@kinds("fused", "split", "wgmma_fused", "wgmma_split")
def test_the_schedule_changes_no_bit(
    backend: Backend, kernels: Kernels, dtype: torch.dtype
) -> None:
    torch.manual_seed(derived(7))
    lengths = [20, several_tiles(backend, dtype), 0, 64, 7, 65]  # the last tiles are not full
    batch = VarlenBatch.from_lengths(lengths, backend.device)
    assert len(batch.groups) > 1
    case = Case(lengths, heads=kernels.heads(len(lengths)), p=0.1)
    inputs, dout = backend.put((case.inputs(dtype), case.dout(dtype)))
    expected = results_of(case.ours, inputs, dout)
    for options in (
        {"batch": batch.cu_seqlens, "max_seqlen": 500},
        {"batch": batch},
        {"batch": batch, "schedule": "groups"},
    ):
        again = results_of(partial(case.ours, **options), inputs, dout)
        assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))
    # Without the table of sequences, and in groups that fit badly.
    few = [(0, 0, 0), (len(lengths), max(lengths), max(lengths))]
    op, order = torch.ops.bert_unpad, batch.order
    settings = (batch.cu_seqlens, max(lengths), 0.125, 0.1, RNG.to(backend.device), order)
    for groups in (None, torch.tensor(few, dtype=torch.int32)):
        out, lse = op.varlen_attention(inputs["qkv"], *settings, groups)
        saved = (dout, inputs["qkv"], out, lse)
        dqkv, *_ = op.varlen_attention_backward(*saved, *settings, groups)
        assert torch.equal(out, expected[0])
        assert torch.equal(dqkv, expected[1])


@ALL_KERNELS
def test_same_bits_every_time(backend: Backend, kernels: Kernels, dtype: torch.dtype) -> None:
    torch.manual_seed(derived(6))
    lengths = lengths_for(backend, dtype) * 3
    if backend.name in MODELS:
        lengths = [50, 16] if dtype == torch.float32 else [129, 16, 70]
    few = 4 if backend.name == "cpu" else 1
    case = Case(lengths, heads=kernels.heads(len(lengths), few), p=0.1)
    inputs, dout = backend.put((case.inputs(dtype), case.dout(dtype)))
    batch = VarlenBatch.from_lengths(lengths, backend.device)
    for schedule in ["list", "groups"] if backend.name == "cuda" else ["list"]:
        run = partial(case.ours, batch=batch, schedule=schedule)
        backend.assert_same_bits(partial(results_of, run, inputs, dout))
