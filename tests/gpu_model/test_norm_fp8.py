"""dropout_add_layer_norm that writes 8 bits too, on the model of a block: the bits of two steps."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from bert_unpad.ops.delayed_scaling import DelayedScale
from bert_unpad.ops.fp8 import quantize_by  # on a CPU: by PyTorch
from gpu_model.block_model import POLICIES
from gpu_model.build import compiler
from tests.gpu_model.test_fp8 import aligned, assert_same_numbers
from tests.support.model_checks import DTYPES, Buffers, assert_every_site_is_needed
from tests.support.model_norm import forward_params, model
from tests.support.op_checks import RNG
from tests.support.seeds import derived

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")
SCALE = 0.01


@pytest.fixture
def kernels():
    kernels = model()
    kernels.configure()
    kernels.set_device(multiprocessors=1)
    return kernels


def draw(rows: int, hidden: int, dtype: torch.dtype) -> list[Tensor]:
    """x, residual, weight, bias, x_bias."""
    torch.manual_seed(derived(hidden))
    rounded = [torch.randn(rows, hidden).to(dtype) for _ in range(2)]
    return [*rounded, 1 + 0.3 * torch.randn(hidden), *torch.randn(2, hidden)]


def forward(
    inputs: list[Tensor | None], *, fp8: bool = True, transpose: bool = True,
    largest: Tensor | None = None, p: float = 0.1, rms: bool = False, return_sum: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """y, sum, mean and rstd; with `fp8` q and its transposed copy."""
    x, residual, weight, bias, x_bias = inputs
    kernels = model()
    params, written = forward_params(
        Buffers(kernels), x, x_bias, residual, weight, bias, p, 1e-5, RNG, rms, return_sum
    )
    results = dict(zip(("y", "sum", "mean", "rstd"), written, strict=True))
    if not fp8:
        kernels.call("norm_forward", ctypes.byref(params))
        return results
    rows, hidden = x.shape
    q = aligned(torch.full((rows, hidden), 0x55, dtype=torch.uint8))
    kept = aligned(torch.full((hidden, -(-rows // 16) * 16), 0x55, dtype=torch.uint8))
    kept = kept if transpose else None
    scale = torch.tensor([SCALE])
    kernels.register(scale, writable=False)
    for tensor in (q, kept, largest):
        if tensor is not None:
            kernels.register(tensor)
    kernels.call("norm_fp8_forward", ctypes.byref(params), scale, q, kept, largest)
    results["q"] = q.view(torch.float8_e4m3fn)
    if transpose:
        results["kept"] = kept.view(torch.float8_e4m3fn)
    return results


def two_steps(inputs: list[Tensor | None], **settings) -> tuple[dict[str, Tensor], Tensor]:
    """The same results, the 8 bits by another kernel's rule, and the largest value."""
    results = forward(inputs, fp8=False, **settings)
    noted = DelayedScale(torch.tensor(SCALE), torch.zeros(1024))
    results["q"], results["kept"], _ = quantize_by(results["y"], False, True, noted)
    return results, noted.largest.max()


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for name, x in got.items():
        assert_same_numbers(x, want[name])


# A row; turns of 16 rows, of which a block has three; one, three and four groups of columns a lane;
# rows of a block, which take two kernels, as fp32 ones of more than 256 columns do.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 16), (150, 16), (33, 256), (70, 528), (40, 1024), (5, 1040)])
def test_the_bits_are_those_of_two_steps(kernels, shape, dtype):
    inputs = draw(*shape, dtype)
    want, want_largest = two_steps(inputs)
    for number, policy in enumerate(POLICIES):
        kernels.configure(policy, seed=3)
        kernels.set_device(multiprocessors=1 + number)
        largest = torch.zeros(1024)
        assert_same(forward(inputs, largest=largest), want)
        assert largest.max() == want_largest


@pytest.mark.parametrize("hidden", [64, 1040])
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("return_sum", [False, True])
def test_other_forms(kernels, return_sum, rms, hidden):
    x, residual, weight, *_ = draw(35, hidden, torch.bfloat16)
    inputs = [x, residual, weight, None, None]
    settings = {"p": 0.0, "rms": rms, "return_sum": return_sum}
    want, _ = two_steps(inputs, **settings)
    got = forward(inputs, transpose=False, **settings)
    assert "kept" not in got
    assert_same(got, want)


@pytest.mark.parametrize("hidden", [64, 1040])
def test_odd_values(kernels, hidden):
    """Values too large for the scale, for y's dtype, and not finite ones."""
    inputs = draw(20, hidden, torch.bfloat16)
    inputs[0][3, 5] = torch.nan
    inputs[2][3], inputs[2][9] = 3e38, 1e3
    want, want_largest = two_steps(inputs)
    assert want["y"].isinf().any()
    assert (want["q"].float() == 448).any()
    largest = torch.zeros(1024)
    assert_same(forward(inputs, largest=largest), want)
    assert largest.max() == want_largest == torch.inf


def test_the_largest_value_is_kept(kernels):
    inputs = draw(20, 32, torch.float32)
    _, own = two_steps(inputs)
    for before in (50.0, 1e-3):
        largest = torch.zeros(1024)
        largest[0] = before
        forward(inputs, largest=largest)
        assert largest.max() == max(own, before)


def test_no_rows(kernels):
    results = forward(draw(0, 64, torch.bfloat16))
    assert results["q"].shape == (0, 64)


def test_every_barrier_is_needed(kernels):
    """After the parameters, in each turn, and for the largest value."""
    inputs = draw(150, 64, torch.bfloat16)
    sites = assert_every_site_is_needed(
        kernels, lambda: forward(inputs, largest=torch.zeros(1024)), seeds=range(3)
    )
    assert [site.kind for site in sites] == ["sync_block"] * 3
