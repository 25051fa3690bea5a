"""Attention as nvcc compiles it for Blackwell (compute capability 10.0 and later), where kernels
keep in shared memory what they work on."""

import re

import pytest
import torch

from gpu_model.block_model import POLICIES
from gpu_model.ptx.interpreter import Program
from tests.support.attention_cases import FUSED, PARTS, SPLIT, Case, compare, random_buckets
from tests.support.backends import OnTheModel
from tests.support.model_attention import model, ptx_of
from tests.support.model_checks import NEEDED
from tests.support.seeds import derived


@pytest.fixture(scope="module")
def compiled():
    names = ("attention_d64", "attention_d128", "attention_bias_d96", "position_bias")
    return ptx_of("120", "cuda/column_sum", *(f"attention/{name}" for name in names))


@pytest.fixture
def on_model(compiled):
    """Operators run there what is compiled."""
    with model().running(Program(compiled)), OnTheModel() as mode:
        mode.capability, mode.multiprocessors = (12, 0), FUSED
        yield mode


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_fused_and_split_passes(on_model, p, policy):
    torch.manual_seed(derived(1))
    on_model.policy = policy
    compare(Case([70, 0, 270], heads=1, p=p), torch.bfloat16)  # several passes over keys
    on_model.multiprocessors = SPLIT
    compare(Case([70, 0, 17], p=p), torch.float16)


def test_windows_and_wide_heads(on_model):
    torch.manual_seed(derived(2))
    case = Case([33, 0, 90], head_dim=128, kv_heads=1, window=(20, 7), p=0.1)
    compare(case, torch.bfloat16)


@pytest.mark.parametrize("parts", [PARTS[:1], PARTS], ids="+".join)
def test_position_biases(on_model, parts):
    torch.manual_seed(derived(3))
    bias = {"buckets": random_buckets(12, 7), "parts": parts}
    compare(Case([70, 0, 5], head_dim=96, p=0.1, **bias), torch.bfloat16)


def test_the_first_barrier_of_each_kernel_is_needed(on_model, compiled):
    """In forward and fused kernels the one behind what they keep."""
    torch.manual_seed(derived(4))
    parts = compiled["attention_d64.cu"].split(".entry")
    text = ".entry".join(re.sub(r"bar\.sync\s+0;", "", part, count=1) for part in parts)
    with (
        model().running(Program({"attention_d64.cu": text})),
        pytest.raises(RuntimeError, match=NEEDED),
    ):
        compare(Case([70], heads=1, p=0.1), torch.bfloat16)
