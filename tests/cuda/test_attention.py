"""Attention on a GPU: streams, CUDA graphs, devices, sizes, and errors.

What the host cannot check (cu_seqlens is on the device) has to stop the kernel. Values are in
tests/ops, for every backend.
"""

import copy
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from bert_unpad import ops
from bert_unpad.batch import PackedInputs, VarlenBatch
from bert_unpad.nn import EncoderConfig, EncoderForPreTraining
from tests.support.attention_cases import random_buckets
from tests.support.cuda_checks import (
    DTYPES,
    GPU_ONLY,
    NEEDS_TWO_GPUS,
    assert_graph_takes_new_values,
    assert_runs_on_the_current_stream,
    assert_same_bits,
)
from tests.support.op_checks import RNG, cu_seqlens
from tests.support.processes import TIMEOUT
from tests.support.seeds import derived
from tests.support.tolerances import assert_same_gradients

pytestmark = GPU_ONLY

LENGTHS = [200, 0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 511, 512, 513]
SCHEDULES = ["list", "groups"]


def random_qkv(lengths: list[int], heads: int = 2) -> tuple[Tensor, Tensor]:
    """qkv and dout."""
    qkv, dout = torch.randn(sum(lengths), 4, heads, 64, device="cuda").bfloat16().split([3, 1], 1)
    return qkv.contiguous(), dout[:, 0].contiguous()


def results(qkv: Tensor, dout: Tensor, *batch, p: float = 0.1, **options) -> list[Tensor]:
    """out and dqkv."""
    x = qkv.detach().requires_grad_()
    rng = RNG.to(qkv.device)
    out = ops.varlen_attention(x, *batch, dropout_p=p, rng=rng, **options)
    out.backward(dout)
    return [out.detach(), x.grad]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_runs_on_the_current_stream(schedule: str) -> None:
    torch.manual_seed(derived(10))
    qkv, dout = random_qkv(LENGTHS)
    batch = VarlenBatch.from_lengths(LENGTHS, "cuda")
    # What follows on the stream must wait for all groups.
    assert_runs_on_the_current_stream(lambda x: results(x, dout, batch, schedule=schedule), qkv)


@pytest.mark.parametrize("full", [False, True], ids=["few heads", "full GPU"])
@pytest.mark.parametrize("grouped", [False, True])
def test_graphs_take_new_inputs_masks_and_lengths(grouped: bool, full: bool) -> None:
    torch.manual_seed(derived(11))
    longest, p, scale = 256, 0.1, 0.125
    lengths = [[256, 100, 17, 3, 64], [1, 30, 256, 64, 89]]
    first, second = (VarlenBatch.from_lengths(n, "cuda") for n in lengths)
    assert first.total == second.total
    sms = torch.cuda.get_device_properties().multi_processor_count
    qkv, dout = random_qkv(lengths[0], -(-sms // 5) if full else 2)
    cu, order, rng = first.cu_seqlens.clone(), first.order.clone(), RNG.cuda()
    # The same groups have to do for both.
    groups = torch.tensor([[2, 256, 256], [3, 256, 256]], dtype=torch.int32) if grouped else None
    op = torch.ops.bert_unpad

    def both() -> list[Tensor]:
        tail = (cu, longest, scale, p, rng, order, groups)
        out, lse = op.varlen_attention(qkv, *tail)
        return [out, op.varlen_attention_backward(dout, qkv, out, lse, *tail)[0]]

    def change() -> None:
        qkv.copy_(torch.randn_like(qkv))
        cu.copy_(second.cu_seqlens)
        order.copy_(second.order)
        rng.add_(1)

    assert_graph_takes_new_values(both, change)


@NEEDS_TWO_GPUS
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_runs_on_the_device_of_its_tensors(schedule: str) -> None:
    qkv, dout = random_qkv(LENGTHS)
    batch = VarlenBatch.from_lengths(LENGTHS, "cuda")
    want = results(qkv, dout, batch, schedule=schedule)
    there = [x.to("cuda:1") for x in (qkv, dout)]
    got = results(*there, batch.to("cuda:1"), schedule=schedule)
    assert_same_bits([x.to("cuda:0") for x in got], want)


@pytest.mark.large(24)
def test_more_than_2_to_the_31_elements() -> None:
    heads, head_dim, length, sequences = 16, 64, 128, 5500
    assert length * sequences * 3 * heads * head_dim > 2**31
    torch.manual_seed(derived(13))
    qkv, dout = random_qkv([length], heads)

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


def random_bias(tokens: int, heads: int, dtype: torch.dtype) -> ops.PositionBias:
    query, key = torch.randn(2, tokens, heads, 9, device="cuda").to(dtype)
    table = torch.randn(9, heads, device="cuda")
    return ops.PositionBias(random_buckets(40, 9).cuda(), table, query, key)


def test_position_biases_in_a_graph() -> None:
    torch.manual_seed(derived(4))
    batch = VarlenBatch.from_lengths([70, 0, 1, 129], "cuda")
    qkv = torch.randn(batch.total, 3, 2, 64, device="cuda").bfloat16()
    bias = random_bias(batch.total, 2, torch.bfloat16)
    assert_graph_takes_new_values(
        lambda: [ops.varlen_attention(qkv, batch, position_bias=bias)],
        lambda: bias.table.mul_(2.0),
    )


@pytest.mark.parametrize("kind", ["bias", "disentangled"])
def test_encoders_with_position_biases_compute_what_they_do_on_a_cpu(kind: str) -> None:
    torch.manual_seed(derived(5))
    config = EncoderConfig(
        model_type="bert_unpad",
        vocab_size=99,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=96,
        initializer_range=0.2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        relative_positions=kind,
        relative_buckets=8,
        max_relative_positions=20,
        relative_terms=("c2p", "p2c") if kind == "disentangled" else (),
    )
    model = EncoderForPreTraining(config)
    batch = VarlenBatch.from_lengths([70, 0, 1, 33])
    masked = torch.arange(0, batch.total, 6)
    ids, labels = torch.randint(99, (batch.total,)), torch.randint(99, (len(masked),))
    inputs = PackedInputs.build(batch, ids, masked_positions=masked, masked_labels=labels)
    gradients = []
    for device in ("cpu", "cuda"):
        here = copy.deepcopy(model).to(device)
        here(inputs.to(device)).mlm_loss_sum.backward()
        named = here.named_parameters()
        gradients.append({name: p.grad.cpu() for name, p in named if p.grad is not None})
    assert_same_gradients(gradients[1], gradients[0], tolerance=1e-3)


INT32 = {"dtype": torch.int32}


# Values are functions, so that the file can be read where there is no GPU.
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: {"qkv": torch.randn(20, 3, 2, 48, device="cuda")}, "head_dim must be .* got 48"),
        (lambda: {"cu": cu_seqlens([7, 13])}, "cu_seqlens must be on the same device"),
        (lambda: {"p": 0.1}, "rng .* is needed with dropout"),
        (lambda: {"p": 0.1, "rng": RNG}, "rng must be on"),
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
    assert_stops(_OUT_OF_RANGE, str(cu))


def assert_stops(script: str, argument: str) -> None:
    """In its own process: the CUDA context is lost."""
    command = [sys.executable, "-c", script, argument]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode != 0
    assert "no error" not in done.stdout
    assert "CUDA error" in done.stderr


_WRONG_TABLE = """
import sys, torch
from bert_unpad import ops
from bert_unpad.batch import VarlenBatch
batch = VarlenBatch.from_lengths([7, 13], "cuda")
qkv = torch.randn(20, 3, 2, 64, device="cuda", dtype=getattr(torch, sys.argv[1]))
settings, order = (batch.cu_seqlens, 13, 0.125, 0.0, None), batch.order_table.view(-1, 4)
out, lse = torch.ops.bert_unpad.varlen_attention(qkv, *settings, order)
torch.cuda.synchronize()
wrong = order.clone()
wrong[:, 1] = 0  # the first token of both sequences
torch.ops.bert_unpad.varlen_attention_backward(out, qkv, out, lse, *settings, wrong)
torch.cuda.synchronize()
print("no error")
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tables_that_differ_from_cu_seqlens_stop_the_kernel(dtype: str) -> None:
    assert_stops(_WRONG_TABLE, dtype)


_WRONG_BUCKET = """
import sys, torch
from bert_unpad import ops
cu = torch.tensor([0, 7, 20], dtype=torch.int32, device="cuda")
qkv = torch.randn(20, 3, 2, 64, device="cuda", dtype=torch.bfloat16)
buckets = torch.tensor([0, 1, int(sys.argv[1])], dtype=torch.int32, device="cuda")
bias = ops.PositionBias(buckets, torch.randn(3, 2, device="cuda"))
ops.varlen_attention(qkv, cu, 13, position_bias=bias)
torch.cuda.synchronize()
print("no error")
"""


@pytest.mark.parametrize("entry", [-1, 3])
def test_impossible_buckets_stop_the_kernel(entry: int) -> None:
    assert_stops(_WRONG_BUCKET, str(entry))
