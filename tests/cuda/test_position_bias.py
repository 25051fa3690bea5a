"""Attention on a GPU with position biases."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from bert_unpad import ops
from bert_unpad.batch import PackedInputs, VarlenBatch
from bert_unpad.nn import EncoderConfig, EncoderForPreTraining
from tests.support.attention_cases import PARTS, Case, compare, random_buckets, random_positions
from tests.support.cuda_attention import (
    LENGTHS,
    SCHEDULES,
    kernels,  # noqa: F401 (a fixture)
)
from tests.support.cuda_checks import (
    DTYPES,
    GPU_ONLY,
    assert_graph_takes_new_values,
    assert_same_bits,
)
from tests.support.op_checks import RNG, cu_seqlens
from tests.support.processes import TIMEOUT
from tests.support.seeds import derived
from tests.support.tolerances import assert_same_gradients

pytestmark = GPU_ONLY

SMALL = [70, 0, 1, 129]
COMBINATIONS = [("table",), ("query",), ("key",), ("query", "key"), PARTS]


def random_bias(tokens: int, heads: int, dtype: torch.dtype) -> ops.PositionBias:
    query, key = torch.randn(2, tokens, heads, 9, device="cuda").to(dtype)
    table = torch.randn(9, heads, device="cuda")
    return ops.PositionBias(random_buckets(40, 9).cuda(), table, query, key)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("parts", COMBINATIONS, ids="+".join)
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts(dtype: torch.dtype, parts: tuple[str, ...]) -> None:
    torch.manual_seed(derived(0))
    options = {"buckets": random_buckets(100, 11).cuda(), "parts": parts, "p": 0.1}
    compare(Case(LENGTHS, head_dim=64, device="cuda", **options), dtype)


@pytest.mark.sanitizer
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
@pytest.mark.parametrize("window", [(-1, -1), (20, 40)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_heads(dtype: torch.dtype, window: tuple[int, int], head_dim: int) -> None:
    torch.manual_seed(derived(head_dim))
    options = {"buckets": random_buckets(30, 7).cuda(), "parts": PARTS, "window": window, "p": 0.1}
    case = Case(SMALL, heads=6, kv_heads=2, head_dim=head_dim, device="cuda", **options)
    compare(case, dtype)


@pytest.mark.sanitizer
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_attention(dtype: torch.dtype, given: bool) -> None:
    torch.manual_seed(derived(1))
    q_lengths, k_lengths = [3, 0, 90, 17, 4, 70], [70, 5, 33, 129, 0, 150]
    positions = random_positions(q_lengths, k_lengths).cuda() if given else None
    options = {"buckets": random_buckets(25, 9).cuda(), "parts": PARTS, "positions": positions}
    compare(Case(k_lengths, q_lengths, kv_heads=1, head_dim=64, device="cuda", **options), dtype)


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_sequences(dtype: torch.dtype) -> None:
    torch.manual_seed(derived(2))
    options = {"buckets": ops.t5_buckets(device="cuda"), "parts": ("table",), "device": "cuda"}
    compare(Case([8192, 3, 700], heads=1, kv_heads=1, head_dim=64, **options), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_schedule_changes_no_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(derived(3))
    batch = VarlenBatch.from_lengths(LENGTHS, "cuda")
    qkv = torch.randn(batch.total, 8, 64, device="cuda").to(dtype)
    dout = torch.randn(batch.total, 4, 64, device="cuda").to(dtype)
    bias = random_bias(batch.total, 4, dtype)

    def results(*sequences, **options) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (qkv, bias.table, bias.query, bias.key)]
        options |= {"position_bias": ops.PositionBias(bias.buckets, *leaves[1:]), "num_heads": 4}
        out = ops.varlen_attention(leaves[0], *sequences, dropout_p=0.1, rng=RNG.cuda(), **options)
        out.backward(dout)
        return [out.detach(), *(x.grad for x in leaves)]

    expected = results(batch.cu_seqlens, batch.max_seqlen)
    for schedule in SCHEDULES * 2:
        assert_same_bits(results(batch, schedule=schedule), expected)


def test_opcheck() -> None:
    cu, heads = cu_seqlens([7, 0, 13], "cuda"), 2
    bias = random_bias(20, heads, torch.float32)
    parts = [x.requires_grad_() for x in (bias.table, bias.query, bias.key)]
    qkv = torch.randn(20, 3, heads, 32, device="cuda", requires_grad=True)
    args = (qkv, cu, 13, 0.25, 0.1, RNG.cuda(), None, None, 0, -1, 5, bias.buckets, *parts)
    opcheck(torch.ops.bert_unpad.varlen_attention, args)


def test_captured_in_a_graph() -> None:
    torch.manual_seed(derived(4))
    batch = VarlenBatch.from_lengths(SMALL, "cuda")
    qkv = torch.randn(batch.total, 3, 2, 64, device="cuda").bfloat16()
    bias = random_bias(batch.total, 2, torch.bfloat16)
    assert_graph_takes_new_values(
        lambda: [ops.varlen_attention(qkv, batch, position_bias=bias)],
        lambda: bias.table.mul_(2.0),
    )


@pytest.mark.parametrize("kind", ["bias", "disentangled"])
def test_encoders_compute_what_they_do_on_a_cpu(kind: str) -> None:
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


_OUT_OF_RANGE = """
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
    """In its own process: the CUDA context is lost."""
    command = [sys.executable, "-c", _OUT_OF_RANGE, str(entry)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode != 0
    assert "no error" not in done.stdout
    assert "CUDA error" in done.stderr
