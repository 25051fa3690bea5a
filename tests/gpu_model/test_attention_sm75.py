"""Attention on a GPU of compute capability 7.5: fp16 and fp32 with 64 KiB of shared memory a block,
and what nvcc makes of it there, without asynchronous copies and by products of half the depth."""

import re

import pytest
import torch

from gpu_model.block_model import POLICIES
from gpu_model.ptx.interpreter import Program
from tests.support.attention_cases import (
    FUSED,
    PARTS,
    SPLIT,
    Case,
    compare,
    random_buckets,
    with_gradients,
)
from tests.support.backends import OnTheModel
from tests.support.model_attention import model, ptx_of
from tests.support.model_checks import NEEDED
from tests.support.seeds import derived

HEAD_DIMS = [32, 64, 96, 128]
LENGTHS = [33, 0, 130, 5]


@pytest.fixture(autouse=True)
def on_model():
    """Operators run there."""
    with OnTheModel() as mode:
        mode.capability, mode.multiprocessors = (7, 5), FUSED
        yield mode


@pytest.mark.parametrize("sms", [FUSED, SPLIT], ids=["fused", "split"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_dim_has_room(on_model, head_dim, sms):
    """A launch with more shared memory than a block can have is an error."""
    torch.manual_seed(derived(head_dim))
    on_model.multiprocessors = sms
    compare(Case(LENGTHS, head_dim=head_dim, p=0.1), torch.float16)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_windows_and_biases_have_room(head_dim):
    torch.manual_seed(derived(head_dim))
    case = Case(LENGTHS, head_dim=head_dim, kv_heads=1, window=(20, 7), p=0.1)
    compare(case, torch.float16)
    bias = {"buckets": random_buckets(12, 7), "parts": PARTS}
    compare(Case([70, 0, 5], head_dim=head_dim, p=0.1, **bias), torch.float16)


def test_fp32():
    torch.manual_seed(derived(1))
    compare(Case(LENGTHS, p=0.1), torch.float32)


def test_bf16_is_refused(on_model):
    case = Case([8])
    inputs, dout = case.inputs(torch.bfloat16), case.dout(torch.bfloat16)
    message = r"varlen_attention: bfloat16 needs .* 8\.0 or later, this one has 7\.5; use float16"
    with pytest.raises(RuntimeError, match=message):
        case.ours(inputs)
    on_model.capability = (8, 0)
    with_gradients(case.ours, inputs, dout)


@pytest.fixture(scope="module")
def compiled():
    """The kernels of two head dimensions, as nvcc compiles them for sm_75."""
    return ptx_of("75", "attention/attention_d64", "attention/attention_d128")


def test_instructions_are_those_that_there_are(compiled):
    for text in compiled.values():
        assert "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32" in text
        for newer in ("m16n8k16", "cp.async", "bf16x2"):
            assert newer not in text


@pytest.mark.parametrize(
    ("pattern", "replacement", "fault"),
    [
        # Rows of a product in each other's place; no barrier after copies.
        (r"(m16n8k8\S+ \{[^}]*\}), \{(%\w+), (%\w+)\}", r"\1, {\3, \2}", None),
        (r"bar\.sync\s+0;", "", NEEDED),
    ],
)
def test_mistakes_are_found(compiled, pattern, replacement, fault):
    torch.manual_seed(derived(3))
    text, count = re.subn(pattern, replacement, compiled["attention_d64.cu"])
    assert count > 0
    wrong = pytest.raises(RuntimeError, match=fault) if fault else pytest.raises(AssertionError)
    with model().running(Program({"attention_d64.cu": text})), wrong:
        compare(Case([70], heads=1), torch.float16)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("head_dim", "p"), [(64, 0.0), (64, 0.1), (128, 0.1)])
def test_compiled_kernels_match_the_reference(on_model, compiled, head_dim, p, policy):
    torch.manual_seed(derived(head_dim))
    on_model.policy = policy
    with model().running(Program(compiled)):
        compare(Case([70, 0, 17], head_dim=head_dim, p=p), torch.float16)
        case = Case([5], [33], head_dim=head_dim, window=(3, -1), p=p)
        compare(case, torch.float16)
