"""Calls of attention on a GPU: streams, CUDA graphs, torch.compile, devices, and errors.

What the host cannot check (cu_seqlens is on the device) has to stop the kernel.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from bert_unpad import ops
from bert_unpad.batch import VarlenBatch
from tests.support.cuda_attention import FULL, LENGTHS, SCHEDULES, heads_for, random_qkv, results
from tests.support.cuda_checks import (
    DTYPES,
    GPU_ONLY,
    assert_graph_takes_new_values,
    assert_runs_on_the_current_stream,
    assert_same_bits,
)
from tests.support.op_checks import RNG, cu_seqlens
from tests.support.processes import TIMEOUT
from tests.support.seeds import derived

pytestmark = GPU_ONLY


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_runs_on_the_current_stream(schedule: str) -> None:
    torch.manual_seed(derived(10))
    qkv, dout = random_qkv(LENGTHS, torch.bfloat16)
    batch = VarlenBatch.from_lengths(LENGTHS, "cuda")
    # What follows on the stream must wait for all groups.
    assert_runs_on_the_current_stream(lambda x: results(x, dout, batch, schedule=schedule), qkv)


@FULL
@pytest.mark.parametrize("grouped", [False, True])
def test_graphs_take_new_inputs_masks_and_lengths(grouped: bool, full: bool) -> None:
    torch.manual_seed(derived(11))
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
        return [out, op.varlen_attention_backward(dout, qkv, out, lse, *tail)[0]]

    def change() -> None:
        qkv.copy_(torch.randn_like(qkv))
        cu.copy_(second.cu_seqlens)
        order.copy_(second.order)
        rng.add_(1)

    assert_graph_takes_new_values(both, change)


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
    torch.manual_seed(derived(12))
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
