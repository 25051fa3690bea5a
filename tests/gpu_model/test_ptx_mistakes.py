"""Mistakes that are made in compiled kernels' text are found: by a fault or by wrong values."""

import re
from functools import cache

import pytest
import torch

from gpu_model import build
from gpu_model.block_model import POLICIES
from gpu_model.ptx import compiler
from gpu_model.ptx.interpreter import Program
from tests.support import model_norm
from tests.support.attention_cases import FUSED, MMA, SPLIT, WGMMA, Case, compare
from tests.support.backends import OnTheModel
from tests.support.model_attention import model
from tests.support.model_checks import NEEDED
from tests.support.op_checks import RNG
from tests.support.seeds import derived

pytestmark = pytest.mark.skipif(compiler.nvcc() is None, reason="needs nvcc")

ARCH = "80"


@cache
def texts(kernels: str) -> dict[str, str]:
    sources = compiler.cuda_sources(build.KERNELS / f"{kernels}.cpp")
    return {f"{source.stem}.ptx": compiler.ptx(source, ARCH) for source in sources}


def edited(kernels: str, pattern: str, replacement: str, file: str = "") -> Program:
    """Every match of a pattern is replaced; there has to be one."""
    count, result = 0, {}
    for name, text in texts(kernels).items():
        if file in name:
            text, found = re.subn(pattern, replacement, text)
            count += found
        result[name] = text
    assert count > 0, pattern
    return Program(result)


# Pattern, replacement, what the fault says; none where values are wrong.
MISTAKES = {
    "operands_of_mma_swapped": (
        r"(mma\.sync\.aligned\S+ \{[^}]*\}, \{[^}]*\}, )\{(%\w+), (%\w+)\}", r"\1{\3, \2}", None,
    ),
    "rows_of_mma_swapped": (
        r"(mma\.sync\.aligned\S+ \{[^}]*\}), \{(%\w+), (%\w+), ", r"\1, {\3, \2, ", None,
    ),
    "not_transposed": (r"\.x4\.trans\.", ".x4.", None),
    "transposed": (r"\.x4\.shared", ".x4.trans.shared", None),
    "no_wait": (r"cp\.async\.wait_group \d+;", "", "(not|never) waited for"),
    "waits_for_too_little": (r"cp\.async\.wait_group \d+;", "cp.async.wait_group 9;",
                             "(not|never) waited for"),
    "not_committed": (r"cp\.async\.commit_group;", "", "(not|never) waited for"),
    "no_barrier": (r"bar\.sync\s+0;", "", NEEDED),
    "copies_half": (r"(cp\.async\.cg\S* \[%\w+\], \[%\w+\], )16, %\w+;", r"\g<1>16, 8;", None),
    "other_shuffle": (r"shfl\.sync\.bfly", "shfl.sync.down", None),
    "other_exponent": (r"ex2\.approx\.ftz\.f32", "lg2.approx.ftz.f32", None),
}  # fmt: skip


@pytest.fixture
def on_model():
    """Operators run there."""
    with OnTheModel() as mode:
        mode.policy, mode.capability, mode.multiprocessors = "in_order", MMA, FUSED
        yield mode


def run(dtype: torch.dtype = torch.bfloat16, longest: int = 70) -> None:
    torch.manual_seed(derived(1))
    compare(Case([longest, 17], heads=1, p=0.1), dtype)


@pytest.mark.parametrize("sms", [FUSED, SPLIT], ids=["fused", "split"])
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_attention(on_model, name, sms):
    pattern, replacement, message = MISTAKES[name]
    on_model.multiprocessors = sms
    program = edited("attention", pattern, replacement, "d64")
    for on_model.policy in POLICIES:
        error = (AssertionError, RuntimeError) if message is None else RuntimeError
        with model().running(program), pytest.raises(error, match=message):
            run()
    with model().running(Program(texts("attention"))):
        run()  # without the mistake


# The same in the kernels with wgmma.
WGMMA_MISTAKES = {
    "not_transposed": (r"(\}, b, p, 1, 1, )1;", r"\g<1>0;", None),
    "transposed": (r"(\}, b, p, 1, 1, )0;", r"\g<1>1;", None),
    "score_gradients_not_transposed": (r"a, b, p, 1, 1, 1, 1;", "a, b, p, 1, 1, 0, 1;", None),
    "rows_of_a_swapped": (r"\{(%r\d+), (%r\d+), (%r\d+, %r\d+\}, b, p)", r"{\2, \1, \3", None),
    "sums_begin_anew": (r"setp\.ne\.b32 p, %r\d+, 0;", "setp.ne.b32 p, 0, 0;", None),
    "no_wait": (r"wgmma\.wait_group\.sync\.aligned 0;", "", "not waited for|no wgmma.wait_group"),
    "not_committed": (r"wgmma\.commit_group\.sync\.aligned;", "", "wgmma"),
    "no_fence": (r"wgmma\.fence\.sync\.aligned;", "", "no wgmma.fence"),
    "no_proxy_fence": (r"fence\.proxy\.async\.shared::cta;", "", "no fence.proxy.async"),
    "no_barrier": (r"bar\.sync\s+0;", "", NEEDED),
    "no_copy_wait": (r"cp\.async\.wait_group \d+;", "", "(not|never) waited for"),
}


@pytest.mark.parametrize("name", WGMMA_MISTAKES)
def test_mistakes_in_attention_with_wgmma(on_model, name):
    pattern, replacement, message = WGMMA_MISTAKES[name]
    on_model.capability = WGMMA
    program = edited("attention", pattern, replacement, "d64_sm90a")
    for on_model.policy in POLICIES:
        error = (AssertionError, RuntimeError) if message is None else RuntimeError
        with model().running(program), pytest.raises(error, match=message):
            run(longest=130)  # for up to 128 tokens backward is another kernel


def test_mistakes_in_addresses(on_model):
    """Rows further on than there is memory."""
    program = edited("attention", r"(cp\.async\.cg\S+ \[%\w+\], \[%\w+)\]", r"\1+1048576]", "d64")
    with model().running(program), pytest.raises(RuntimeError, match="global memory"):
        run()


def test_a_norm_whose_warps_do_not_wait():
    kernels = model_norm.model()
    x, residual = (torch.randn(3, 2056) for _ in range(2))
    norm = torch.randn(2056), torch.randn(2056), 0.1, 1e-5, RNG
    program = edited("norm", r"bar\.sync\s+0;", "")
    for policy in POLICIES:
        kernels.configure(policy, seed=1)
        with kernels.running(program), pytest.raises(RuntimeError, match=NEEDED):
            model_norm.dropout_add_layer_norm(x, None, residual, *norm)
    kernels.configure()
