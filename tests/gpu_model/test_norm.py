"""The CUDA kernels of dropout_add_layer_norm, run on the model of a block.

Values and gradients against the plain reference, masks against the CPU operator, the same bits from
every order of threads, and a check that each barrier is needed.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from bert_unpad import ops
from gpu_model.block_model import POLICIES
from gpu_model.build import compiler
from tests.support import reference
from tests.support.model_checks import assert_every_site_is_needed
from tests.support.model_norm import NormCudaParams, RowNormParams, layer_norm, model
from tests.support.op_checks import RNG, results_of
from tests.support.seeds import derived

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAMES = ["y", "dx", "dresidual", "dweight", "dbias", "dx_bias"]
# A lane has no, some or all of its groups of columns; one warp a row, several, and rows for the
# general kernel: odd, and longer than any other takes.
WIDTHS = [8, 64, 128, 768, 1000, 1024, 2056, 4096, 7, 4104]


@pytest.fixture(autouse=True)
def kernels():
    kernels = model()
    kernels.configure()
    kernels.set_device(multiprocessors=1)
    return kernels


def draw(
    rows: int, hidden: int, dtype: torch.dtype, parameter_dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], Tensor]:
    """x, residual, weight, bias, x_bias; and the gradient of y."""
    params = [1 + 0.3 * torch.randn(hidden), torch.randn(hidden), torch.randn(hidden)]
    inputs = [torch.randn(rows, hidden).to(dtype) for _ in range(3)]
    return inputs[:2] + [t.to(parameter_dtype) for t in params], inputs[2]


def compare(inputs: list[Tensor | None], dy: Tensor, p: float, eps: float = 1e-12) -> None:
    def plain(x, residual, weight, bias, x_bias):
        return reference.dropout_add_layer_norm(
            x, residual, weight, bias, dropout_p=p, eps=eps, x_bias=x_bias, rng=RNG
        )

    names = NAMES[:1] + [n for n, x in zip(NAMES[1:], inputs, strict=True) if x is not None]
    results = layer_norm(*inputs, dy, p=p, eps=eps, rng=RNG)
    reference.assert_as_good_as_pytorch(
        lambda: [results[name] for name in names],
        lambda precision: results_of(plain, inputs, dy, precision),
        dy.dtype,
        names,
    )


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("hidden", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_the_reference(dtype: torch.dtype, hidden: int, p: float) -> None:
    torch.manual_seed(derived(hidden))
    # More rows than the device's blocks take at once where that is quick.
    rows = 45 if hidden <= 64 else 9 if hidden <= 1024 else 3
    compare(*draw(rows, hidden, dtype), p)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("hidden", [13, 264])
@pytest.mark.parametrize("missing", [(1,), (4,), (1, 4)], ids=["residual", "x_bias", "both"])
def test_optional_inputs(missing: tuple[int, ...], hidden: int, p: float) -> None:
    torch.manual_seed(derived(0))
    inputs, dy = draw(5, hidden, torch.float32)
    compare([None if i in missing else x for i, x in enumerate(inputs)], dy, p)


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("hidden", [8, 13, 264, 768, 1032])
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_forms(dtype: torch.dtype, rms: bool, hidden: int, p: float) -> None:
    """LayerNorm without a bias and RMSNorm, whose sum is or is not a result."""
    torch.manual_seed(derived(hidden))
    (x, residual, weight, _, x_bias), dy = draw(7, hidden, dtype)
    dsum, inputs, eps = torch.randn_like(dy), [x, residual, weight, x_bias], 1e-5
    for return_sum in (False, True):
        for given in (dsum, None) if return_sum else (None,):

            def plain(x, residual, weight, x_bias, return_sum=return_sum, given=given):
                result = reference.dropout_add_layer_norm(
                    *(x, residual, weight), dropout_p=p, eps=eps, x_bias=x_bias, rng=RNG, rms=rms,
                    return_sum=return_sum,
                )  # fmt: skip
                if not return_sum:
                    return result
                total, y = result
                # y's gradient, and the sum's.
                return torch.cat([y, total if given is not None else total.detach()])

            douts = dy if not return_sum else torch.cat([dy, dsum])
            results = layer_norm(
                *(x, residual, weight, None, x_bias, dy), p=p, eps=eps, rng=RNG, rms=rms,
                return_sum=return_sum, dsum=given,
            )  # fmt: skip
            assert "mean" not in results or not rms
            y = torch.cat([results["y"], results["sum"]]) if return_sum else results["y"]
            ours = [y, *(results[name] for name in ("dx", "dresidual", "dweight", "dx_bias"))]
            reference.assert_as_good_as_pytorch(
                lambda ours=ours: ours,
                lambda precision, plain=plain, douts=douts: results_of(
                    plain, inputs, douts, precision
                ),
                dtype,
                ["y", "dx", "dresidual", "dweight", "dx_bias"],
            )


@pytest.mark.parametrize("hidden", [13, 40])
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_parameters_in_the_dtype_of_x(dtype: torch.dtype, hidden: int) -> None:
    torch.manual_seed(derived(1))
    compare(*draw(21, hidden, dtype, dtype), 0.1, eps=1e-3)


def test_addresses_that_do_not_allow_vector_loads() -> None:
    torch.manual_seed(derived(2))
    inputs, dy = draw(3, 64, torch.bfloat16)
    store = torch.empty(3 * 64 + 1, dtype=torch.bfloat16)
    shifted = store[1:].view(3, 64)
    assert shifted.data_ptr() % 16 != 0
    compare([shifted.copy_(inputs[0]), *inputs[1:]], dy, 0.1)
    compare(inputs, shifted.copy_(dy), 0.1)


@pytest.mark.parametrize("hidden", [13, 64])
@pytest.mark.parametrize("rows", [0, 1])
def test_none_or_one_row(rows: int, hidden: int) -> None:
    torch.manual_seed(derived(3))
    inputs, dy = draw(rows, hidden, torch.bfloat16)
    compare(inputs, dy, 0.1)
    if rows == 0:
        results = layer_norm(*inputs, dy, p=0.1, rng=RNG)
        for name in ("dweight", "dbias", "dx_bias"):
            assert not results[name].any()


@pytest.mark.parametrize(
    ("hidden", "dtype"),
    [(520, torch.bfloat16), (1000, torch.bfloat16)]  # rows of 3 and of 4 groups a lane
    + [(n, torch.float32) for n in (13, 72, 1032)],
)
def test_masks_are_those_of_the_cpu_operator(hidden: int, dtype: torch.dtype) -> None:
    torch.manual_seed(derived(4))
    inputs, dy = draw(11, hidden, dtype)
    rtol, atol = (1e-4, 1e-5) if dtype == torch.float32 else (0.02, 0.5)
    for p in (0.1, 0.5, 0.99):
        got = layer_norm(*inputs, dy, p=p, rng=RNG)
        *operands, x_bias = inputs
        want = results_of(
            lambda *t, p=p, b=x_bias: ops.dropout_add_layer_norm(
                *t, dropout_p=p, x_bias=b, rng=RNG
            ),
            operands,
            dy,
        )
        assert torch.equal(got["dx"] == 0, want[1] == 0)
        torch.testing.assert_close(got["dx"], want[1], rtol=rtol, atol=atol)
        torch.testing.assert_close(got["y"], want[0], rtol=rtol, atol=atol)


def test_large_offset_does_not_cancel() -> None:
    torch.manual_seed(derived(5))
    for hidden in (60, 64):
        inputs, dy = draw(4, hidden, torch.float32)
        inputs[0] += 1000.0
        got = layer_norm(*inputs[:4], None, dy)["y"]
        wide = [t.double() for t in inputs[:4]]
        # Rounding x + residual to fp32 costs 1e-4 here; a one-pass variance would cost 1e-1.
        assert (got - reference.dropout_add_layer_norm(*wide)).abs().max() < 1e-3


@pytest.mark.parametrize("hidden", [13, 64, 520, 1032])
def test_same_bits_in_any_order_of_threads_and_blocks(kernels, hidden: int) -> None:
    torch.manual_seed(derived(6))
    kernels.set_device(multiprocessors=2)
    inputs, dy = draw(15, hidden, torch.bfloat16)
    runs = []
    for policy in POLICIES:
        for seed in range(2):
            kernels.configure(policy, seed)
            runs.append(layer_norm(*inputs, dy, p=0.1, rng=RNG))
    for run in runs[1:]:
        for name, x in run.items():
            assert torch.equal(x, runs[0][name]), name


@pytest.mark.parametrize(("hidden", "rows"), [(8, 330), (13, 90), (264, 50)])
def test_sums_over_many_blocks(kernels, hidden: int, rows: int) -> None:
    """More than are added up at once."""
    torch.manual_seed(derived(8))
    dtype = torch.bfloat16 if hidden == 8 else torch.float32
    inputs, dy = draw(rows, hidden, dtype)
    runs = []
    kernels.set_device(multiprocessors=20)
    compare(inputs, dy, 0.1)
    for policy in POLICIES:
        kernels.configure(policy, seed=1)
        runs.append(layer_norm(*inputs, dy, p=0.1, rng=RNG))
    for run in runs[1:]:
        for name, x in run.items():
            assert torch.equal(x, runs[0][name]), name


def test_scratch_memory_of_a_large_layer(kernels) -> None:
    """The counts of docs/development/column-sums.md."""
    kernels.set_device(multiprocessors=132)
    params = NormCudaParams(norm=RowNormParams(dtype=1))  # bfloat16
    params.norm.rows, params.norm.hidden = 12288, 1024
    sizes = (ctypes.c_int64 * 2)()
    kernels.call("norm_scratch", ctypes.byref(params), sizes)
    assert list(sizes) == [132 + 11, 12]


@pytest.mark.parametrize(
    ("hidden", "barriers"),
    # After the parameters, forward and backward; for the row that was copied ahead, in both; around
    # the sums over warps; in sums over a row that a block holds; around the ticket.
    [(64, 8), (1032, 5), (13, 3)],
)
def test_every_barrier_is_needed(kernels, hidden: int, barriers: int) -> None:
    torch.manual_seed(derived(7))
    inputs, dy = draw(5, hidden, torch.bfloat16)

    def run() -> None:
        layer_norm(*inputs, dy, p=0.1, rng=RNG)

    sites = assert_every_site_is_needed(kernels, run)
    assert len(sites) == barriers, sites
