"""Variable-length attention on a GPU.

Values are held against float64 by the rule of tests/reference.py, dropout masks against the CPU's
bit for bit. What the host cannot check (cu_seqlens is on the device) has to stop the kernel.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import reference
import torch
from op_checks import RNG, compare_attention, compare_cross_attention, cu_seqlens
from torch import Tensor
from torch.library import opcheck

from bert_unpad import ops
from bert_unpad.batch import VarlenBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

# Around the edges of fragments, warps and blocks.
LENGTHS = [200, 0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 511, 512, 513]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SCHEDULES = ["list", "groups"]
# A head of a sequence is a block of its own in the backward pass where there are enough of them.
FULL = pytest.mark.parametrize("full", [False, True], ids=["few heads", "full GPU"])


def heads_for(sequences: int, full: bool) -> int:
    """Two, or enough for a block on each multiprocessor."""
    if not full:
        return 2
    return -(-torch.cuda.get_device_properties().multi_processor_count // sequences)


def random_qkv(lengths: list[int], dtype: torch.dtype, heads: int = 2, head_dim: int = 64):
    """qkv and dout."""
    total = sum(lengths)
    qkv = torch.randn(total, 3, heads, head_dim, device="cuda").to(dtype)
    return qkv, torch.randn(total, heads, head_dim, device="cuda").to(dtype)


def results(qkv: Tensor, dout: Tensor, *batch, p: float = 0.1, **options) -> list[Tensor]:
    """out and dqkv."""
    x = qkv.detach().requires_grad_()
    rng = RNG.to(qkv.device)
    out = ops.varlen_attention(x, *batch, dropout_p=p, rng=rng, **options)
    out.backward(dout)
    return [out.detach(), x.grad]


def assert_same_bits(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@FULL
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_the_reference(dtype: torch.dtype, head_dim: int, p: float, full: bool) -> None:
    torch.manual_seed(0)
    heads = heads_for(len(LENGTHS), full)
    compare_attention(dtype, LENGTHS, heads=heads, head_dim=head_dim, p=p, device="cuda")


@pytest.mark.sanitizer
@FULL
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_small_batches_of_all_kinds(
    dtype: torch.dtype, head_dim: int, p: float, full: bool
) -> None:
    torch.manual_seed(1)
    heads, lengths = heads_for(4, full), [70, 0, 1, 129]
    compare_attention(dtype, lengths, heads=heads, head_dim=head_dim, p=p, device="cuda")


@pytest.mark.parametrize("lengths", [[1], [16], [64], [513, 1], [1] * 70, [0, 0, 3]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_batches(dtype: torch.dtype, lengths: list[int]) -> None:
    torch.manual_seed(1)
    compare_attention(dtype, lengths, heads=3, p=0.1, device="cuda")


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [[8192], [3, 8192, 0, 700, 130]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_sequences(dtype: torch.dtype, lengths: list[int]) -> None:
    torch.manual_seed(2)
    compare_attention(dtype, lengths, heads=1, device="cuda")


@pytest.mark.parametrize("scale", [0.7, -0.3])
def test_scale_is_applied_before_the_softmax(scale: float) -> None:
    torch.manual_seed(3)
    compare_attention(torch.float32, [40, 3, 130], scale=scale, device="cuda")


@pytest.mark.sanitizer
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_attention(dtype: torch.dtype, head_dim: int) -> None:
    torch.manual_seed(4)
    q_lengths, k_lengths = [3, 0, 40, 17, 0, 77, 130], [70, 5, 33, 129, 0, 512, 200]
    options = {"head_dim": head_dim, "device": "cuda"}
    compare_cross_attention(dtype, q_lengths, k_lengths, p=0.1, **options)


def test_cross_attention_takes_an_order() -> None:
    torch.manual_seed(5)
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


@pytest.mark.sanitizer
@FULL
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_schedule_changes_no_bit(dtype: torch.dtype, full: bool) -> None:
    torch.manual_seed(6)
    qkv, dout = random_qkv(LENGTHS, dtype, heads_for(len(LENGTHS), full))
    batch = VarlenBatch.from_lengths(LENGTHS, "cuda")
    assert len(batch.groups) > 1
    expected = results(qkv, dout, batch.cu_seqlens, batch.max_seqlen)
    for schedule in SCHEDULES:
        assert_same_bits(results(qkv, dout, batch, schedule=schedule), expected)


@FULL
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_every_time(dtype: torch.dtype, schedule: str, full: bool) -> None:
    torch.manual_seed(7)
    qkv, dout = random_qkv(LENGTHS * 3, dtype, heads_for(3 * len(LENGTHS), full))
    batch = VarlenBatch.from_lengths(LENGTHS * 3, "cuda")
    first = results(qkv, dout, batch, schedule=schedule)
    for _ in range(5):
        assert_same_bits(results(qkv, dout, batch, schedule=schedule), first)


@pytest.mark.sanitizer
@FULL
@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_input_and_gradient(dtype: torch.dtype, full: bool) -> None:
    torch.manual_seed(8)
    heads = heads_for(2, full)
    # Heads before q, k, v, and only 64 of 96 columns used.
    qkv = torch.randn(230, heads, 3, 96, device="cuda").to(dtype).transpose(1, 2)[..., :64]
    dout = torch.randn(230, 64, heads, device="cuda").to(dtype).transpose(1, 2)
    assert not qkv.is_contiguous()
    assert dout.stride(-1) != 1
    batch = VarlenBatch.from_lengths([200, 30], "cuda")
    assert_same_bits(results(qkv, dout, batch), results(qkv.contiguous(), dout.contiguous(), batch))


def test_large_scores_stay_finite() -> None:
    torch.manual_seed(9)
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
    expected = reference.varlen_attention(qkv, [70, 70]).isnan()
    assert torch.equal(out.isnan(), expected)
    assert expected.any()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_runs_on_the_current_stream(schedule: str) -> None:
    torch.manual_seed(10)
    qkv, dout = random_qkv(LENGTHS, torch.bfloat16)
    batch = VarlenBatch.from_lengths(LENGTHS, "cuda")
    want = results(qkv, dout, batch, schedule=schedule)
    late = torch.zeros_like(qkv)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(qkv)
        got = results(late, dout, batch, schedule=schedule)
        # What follows on the stream must wait for all groups.
        sums = [x.clone() for x in got]
    stream.synchronize()
    assert_same_bits(sums, want)


@FULL
@pytest.mark.parametrize("grouped", [False, True])
def test_graphs_take_new_inputs_masks_and_lengths(grouped: bool, full: bool) -> None:
    torch.manual_seed(11)
    longest, p, scale = 256, 0.1, 0.125
    lengths = [[256, 100, 17, 3, 64], [1, 30, 256, 64, 89]]
    first, second = (VarlenBatch.from_lengths(n, "cuda") for n in lengths)
    assert first.total == second.total
    qkv, dout = random_qkv(lengths[0], torch.bfloat16, heads_for(5, full))
    cu, order, rng = first.cu_seqlens.clone(), first.order.clone(), RNG.cuda()
    # The same groups have to do for both.
    groups = torch.tensor([[2, 256, 256], [3, 256, 256]], dtype=torch.int32) if grouped else None
    op = torch.ops.bert_unpad

    def both() -> list[Tensor]:
        tail = (cu, longest, scale, p, rng, order, groups)
        out, lse = op.varlen_attention(qkv, *tail)
        return [out, op.varlen_attention_backward(dout, qkv, out, lse, *tail)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        both()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    graph.replay()
    assert_same_bits(captured, both())
    before = captured[0].clone()
    qkv.copy_(torch.randn_like(qkv))
    cu.copy_(second.cu_seqlens)
    order.copy_(second.order)
    rng.add_(1)
    graph.replay()
    assert_same_bits(captured, both())
    assert not torch.equal(captured[0], before)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_runs_on_the_device_of_its_tensors(schedule: str) -> None:
    qkv, dout = random_qkv(LENGTHS, torch.bfloat16)
    batch = VarlenBatch.from_lengths(LENGTHS, "cuda")
    want = results(qkv, dout, batch, schedule=schedule)
    there = [x.to("cuda:1") for x in (qkv, dout)]
    got = results(*there, batch.to("cuda:1"), schedule=schedule)
    assert_same_bits([x.to("cuda:0") for x in got], want)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_compiles_without_graph_breaks(schedule: str) -> None:
    torch.manual_seed(12)
    qkv, dout = random_qkv([7, 0, 130], torch.bfloat16)
    batch = VarlenBatch.from_lengths([7, 0, 130], "cuda")
    assert batch.group_sizes.device.type == "cpu"

    def f(x: Tensor) -> Tensor:
        rng = RNG.to("cuda")
        return ops.varlen_attention(x * 2, batch, dropout_p=0.1, rng=rng, schedule=schedule)

    grads = []
    for run in (f, torch.compile(f, fullgraph=True, backend="aot_eager")):
        x = qkv.detach().requires_grad_()
        run(x).backward(dout)
        grads.append(x.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_opcheck(p: float) -> None:
    rng = RNG.cuda() if p else None
    qkv = torch.randn(20, 3, 2, 32, device="cuda", requires_grad=True)
    batch = VarlenBatch.from_lengths([7, 0, 13], "cuda")
    tail = (0.25, p, rng, batch.order, batch.group_sizes)
    opcheck(torch.ops.bert_unpad.varlen_attention, (qkv, batch.cu_seqlens, 13, *tail))
    q = torch.randn(5, 2, 32, device="cuda", requires_grad=True)
    kv = torch.randn(20, 2, 2, 32, device="cuda", requires_grad=True)
    args = (q, kv, cu_seqlens([2, 0, 3], "cuda"), batch.cu_seqlens, 3, 13, *tail)
    opcheck(torch.ops.bert_unpad.varlen_cross_attention, args)


INT32 = {"dtype": torch.int32}


# Values are functions, so that the file can be read where there is no GPU.
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: {"qkv": torch.randn(20, 2, 2, 64, device="cuda")}, "qkv must have shape"),
        (lambda: {"qkv": torch.randn(20, 3, 2, 64, device="cuda").double()}, "float32, bfloat16"),
        (lambda: {"qkv": torch.randn(20, 3, 2, 48, device="cuda")}, "head_dim must be .* got 48"),
        (lambda: {"cu": cu_seqlens([7, 13])}, "cu_seqlens must be on the same device"),
        (lambda: {"cu": cu_seqlens([7, 13], "cuda").long()}, "cu_seqlens must be int32"),
        (lambda: {"cu": torch.zeros(2, 2, device="cuda", **INT32)}, "cu_seqlens must have shape"),
        (lambda: {"p": 1.0}, r"dropout_p must be in \[0, 1\)"),
        (lambda: {"p": 0.1}, "rng .* is needed with dropout"),
        (lambda: {"p": 0.1, "rng": RNG}, "rng must be on"),
        (lambda: {"p": 0.1, "rng": RNG.cuda().int()}, "rng must be int64"),
        (lambda: {"order": torch.arange(2, **INT32)}, "order must be on the same device"),
        (lambda: {"order": torch.arange(3, device="cuda", **INT32)}, "order must have shape"),
        (lambda: {"groups": torch.zeros(1, 3, device="cuda", **INT32)}, "must be on the CPU"),
        (lambda: {"groups": torch.tensor([[1, 13, 13]], **INT32)}, "must add up to 2, got 1"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(change, message: str) -> None:
    good = {
        "qkv": torch.randn(20, 3, 2, 64, device="cuda"),
        "cu": cu_seqlens([7, 13], "cuda"),
        "max_seqlen": 13,
        "scale": 0.125,
        "p": 0.0,
        "rng": None,
        "order": torch.arange(2, device="cuda", **INT32),
        "groups": None,
    }
    with pytest.raises(RuntimeError, match=message):
        torch.ops.bert_unpad.varlen_attention(*(good | change()).values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_misaligned_rows_are_refused(dtype: torch.dtype) -> None:
    store = torch.randn(20 * 3 * 2 * 64 + 1, device="cuda").to(dtype)
    qkv = store[1:].view(20, 3, 2, 64)
    with pytest.raises(RuntimeError, match="16"):
        ops.varlen_attention(qkv, VarlenBatch.from_lengths([20], "cuda"))


_OUT_OF_RANGE = """
import json, sys, torch
from bert_unpad import ops
cu = torch.tensor(json.loads(sys.argv[1]), dtype=torch.int32, device="cuda")
qkv = torch.randn(20, 3, 2, 64, device="cuda", dtype=torch.bfloat16)
ops.varlen_attention(qkv, cu, 13)
torch.cuda.synchronize()
print("no error")
"""


@pytest.mark.parametrize(
    "cu", [[0, 7, 21], [0, 7, 19], [1, 8, 20], [0, 9, 7, 20], [0, 6, 20], [-4, 8, 20]], ids=str
)
def test_cu_seqlens_that_do_not_fit_stop_the_kernel(cu: list[int]) -> None:
    """In a process of its own: the CUDA context is lost."""
    command = [sys.executable, "-c", _OUT_OF_RANGE, str(cu)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "no error" not in done.stdout
    assert "CUDA error" in done.stderr


@pytest.mark.slow
def test_more_than_2_to_the_31_elements() -> None:
    heads, head_dim, length, sequences = 16, 64, 128, 5500
    assert length * sequences * 3 * heads * head_dim > 2**31
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of GPU memory")
    torch.manual_seed(13)
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
