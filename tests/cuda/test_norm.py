"""dropout_add_layer_norm on a GPU: values, masks, calls and errors."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from bert_unpad import ops
from tests.support import cuda_checks, reference
from tests.support.cuda_checks import (
    DTYPES,
    GPU_ONLY,
    assert_graph_takes_new_values,
    assert_runs_on_the_current_stream,
    assert_same_bits,
)
from tests.support.op_checks import RNG, results_of
from tests.support.seeds import derived

pytestmark = GPU_ONLY

NAMES = ["y", "dx", "dresidual", "dweight", "dbias", "dx_bias"]
# Part of a warp, a warp, several of them, rows of a block, and the general kernel. A row's gradient
# has two degrees of freedom less than columns: with few of them it may be next to nothing but
# rounding errors.
SHAPES = [
    *[(37, 8), (300, 64), (70_000, 8), (1000, 128), (2049, 256), (2000, 512), (4096, 768)],
    *[(333, 1000), (4097, 1024), (500, 2048), (300, 4096), (40, 5000), (100, 7), (2, 3, 33)],
    *[(1, 5), (1, 768), (64,), (0, 768), (0, 7)],
]


def draw(
    shape: tuple[int, ...], dtype: torch.dtype, parameter_dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], Tensor]:
    """x, residual, weight, bias, x_bias; and the gradient of y."""
    hidden = shape[-1:]

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda")

    params = [1 + 0.3 * normal(*hidden), normal(*hidden), normal(*hidden)]
    inputs = [normal(*shape).to(dtype) for _ in range(3)]
    return inputs[:2] + [t.to(parameter_dtype) for t in params], inputs[2]


@cache
def rng_on_gpu() -> Tensor:
    """Sent once: while a graph is captured nothing can be copied from the host."""
    return RNG.cuda()


def run(module, inputs, dy, p, precision=None, eps=1e-12) -> list[Tensor]:
    rng = rng_on_gpu()

    def function(x, residual, weight, bias, x_bias):
        return module.dropout_add_layer_norm(
            x, residual, weight, bias, dropout_p=p, eps=eps, x_bias=x_bias, rng=rng
        )

    return results_of(function, inputs, dy, precision)


class OnGpu:
    """The reference, with masks brought to the GPU."""

    @staticmethod
    def dropout_add_layer_norm(x, residual, weight, bias, *, dropout_p, eps, x_bias, rng):
        y = x if x_bias is None else x + x_bias.to(x.dtype)
        if dropout_p > 0.0:
            flat = y.reshape(-1, y.shape[-1])
            mask = reference.row_mask(rng.cpu(), dropout_p, *flat.shape).cuda()
            y = (flat * mask).view_as(y) * reference.dropout_scale(dropout_p)
        return reference.dropout_add_layer_norm(y, residual, weight, bias, eps=eps)


def compare(inputs: list[Tensor | None], dy: Tensor, p: float, eps: float = 1e-12) -> None:
    names = NAMES[:1] + [n for n, x in zip(NAMES[1:], inputs, strict=True) if x is not None]
    reference.assert_as_good_as_pytorch(
        lambda: run(ops, inputs, dy, p, eps=eps),
        lambda precision: run(OnGpu, inputs, dy, p, precision, eps),
        dy.dtype,
        names,
    )


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_the_reference(shape: tuple[int, ...], dtype: torch.dtype, p: float) -> None:
    torch.manual_seed(derived(0))
    compare(*draw(shape, dtype), p)


@pytest.mark.sanitizer
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("hidden", [7, 264, 768, 1024, 1032])
def test_few_rows(hidden: int, p: float) -> None:
    torch.manual_seed(derived(1))
    for dtype in DTYPES[:2]:
        compare(*draw((9, hidden), dtype), p)


@pytest.mark.sanitizer
@pytest.mark.parametrize("hidden", [13, 768])
@pytest.mark.parametrize("missing", [(1,), (4,), (1, 4)], ids=["residual", "x_bias", "both"])
def test_optional_inputs(missing: tuple[int, ...], hidden: int) -> None:
    torch.manual_seed(derived(2))
    inputs, dy = draw((40, hidden), torch.bfloat16)
    for p in (0.0, 0.3):
        compare([None if i in missing else x for i, x in enumerate(inputs)], dy, p)


@pytest.mark.sanitizer
@pytest.mark.parametrize("return_sum", [False, True])
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("hidden", [7, 264, 768, 1024, 1032])
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_forms(dtype: torch.dtype, hidden: int, rms: bool, return_sum: bool) -> None:
    """LayerNorm without a bias and RMSNorm, whose sum is or is not a result."""
    torch.manual_seed(derived(9))
    (x, residual, weight, _, x_bias), dy = draw((40, hidden), dtype)
    dout = torch.cat([dy, torch.randn_like(dy)]) if return_sum else dy
    function = ops.dropout_add_rms_norm if rms else ops.dropout_add_layer_norm

    def run_form(function, settings):
        def form(x, residual, weight, x_bias):
            result = function(
                x, residual, weight, x_bias=x_bias, eps=1e-5, return_sum=return_sum, **settings
            )
            return torch.cat(result) if return_sum else result

        return form

    inputs = [x, residual, weight, x_bias]
    reference.assert_as_good_as_pytorch(
        lambda: results_of(run_form(function, {}), inputs, dout),
        lambda precision: results_of(
            run_form(reference.dropout_add_layer_norm, {"rms": rms}), inputs, dout, precision
        ),
        dtype,
        ["y", "dx", "dresidual", "dweight", "dx_bias"],
    )


@pytest.mark.parametrize("return_sum", [False, True])
def test_other_forms_agree_with_the_cpu(return_sum: bool) -> None:
    """With dropout."""
    torch.manual_seed(derived(10))
    (x, residual, weight, _, _), dy = draw((40, 200), torch.float32)
    dout = torch.cat([dy, dy]) if return_sum else dy

    def form(x, residual, weight):
        settings = {"dropout_p": 0.3, "rng": RNG.to(x.device), "return_sum": return_sum}
        result = ops.dropout_add_rms_norm(x, residual, weight, **settings)
        return torch.cat(result) if return_sum else result

    inputs = [x, residual, weight]
    on_cpu = results_of(form, [t.cpu() for t in inputs], dout.cpu())
    for got, want in zip(results_of(form, inputs, dout), on_cpu, strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_parameters_in_the_dtype_of_x(dtype: torch.dtype) -> None:
    torch.manual_seed(derived(3))
    compare(*draw((400, 768), dtype, dtype), 0.1, eps=1e-3)


@pytest.mark.sanitizer
def test_addresses_that_do_not_allow_vector_loads() -> None:
    torch.manual_seed(derived(4))
    inputs, dy = draw((20, 256), torch.bfloat16)
    shifted = torch.empty(20 * 256 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(20, 256)
    assert shifted.data_ptr() % 16 != 0
    compare([shifted.copy_(inputs[0]), *inputs[1:]], dy, 0.1)
    compare(inputs, shifted.copy_(dy), 0.1)


@pytest.mark.parametrize("hidden", [13, 768, 2048])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_masks_are_those_of_the_cpu_operator(p: float, hidden: int) -> None:
    torch.manual_seed(derived(5))
    inputs, dy = draw((500, hidden), torch.float32)
    got = run(ops, inputs, dy, p)[1].cpu() == 0
    rng = RNG.clone()
    want = results_of(
        lambda x, r, w, b, xb: ops.dropout_add_layer_norm(
            x, r, w, b, dropout_p=p, x_bias=xb, rng=rng
        ),
        [x.cpu() for x in inputs],
        dy.cpu(),
    )[1]
    assert torch.equal(got, want == 0)


@pytest.mark.parametrize("hidden", [13, 1024, 2048])
def test_same_bits_every_time(hidden: int) -> None:
    torch.manual_seed(derived(6))
    inputs, dy = draw((4097, hidden), torch.bfloat16)
    first = run(ops, inputs, dy, 0.1)
    for _ in range(5):
        assert_same_bits(run(ops, inputs, dy, 0.1), first)


def test_streams_and_graphs_at_once_keep_their_counts_apart() -> None:
    """The kernels' last blocks are found by counters that kernels at the same time do not share."""
    torch.manual_seed(derived(6))
    inputs, dy = draw((3000, 256), torch.bfloat16)
    want = run(ops, inputs, dy, 0.1)
    streams = [torch.cuda.Stream() for _ in range(3)]
    captured, replay = cuda_checks.capture(lambda: run(ops, inputs, dy, 0.1))
    torch.cuda.synchronize()
    results = []
    for _ in range(20):
        with torch.cuda.stream(streams[0]):
            replay()
        for stream in streams[1:]:
            with torch.cuda.stream(stream):
                results.append(run(ops, inputs, dy, 0.1))
    torch.cuda.synchronize()
    for result in (captured, *results):
        assert_same_bits(result, want)


def test_runs_on_the_current_stream() -> None:
    torch.manual_seed(derived(7))
    inputs, dy = draw((512, 1024), torch.bfloat16)
    assert_runs_on_the_current_stream(
        lambda x: run(ops, [x, *inputs[1:]], dy, 0.0), inputs[0]
    )  # fmt: skip


def test_graphs_take_new_inputs_and_masks() -> None:
    torch.manual_seed(derived(8))
    (x, residual, weight, bias, x_bias), dy = draw((512, 768), torch.bfloat16)
    rng, op = RNG.cuda(), torch.ops.bert_unpad

    def both() -> list[Tensor]:
        y, _, mean, rstd = op.dropout_add_layer_norm(
            x, x_bias, residual, weight, bias, 0.1, 1e-12, rng
        )
        gradients = op.dropout_add_layer_norm_backward(
            dy, x, x_bias, residual, weight, mean, rstd, 0.1, rng
        )
        return [y, *gradients]

    assert_graph_takes_new_values(both, lambda: rng.add_(1))
    assert_graph_takes_new_values(both, lambda: x.neg_())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_runs_on_the_device_of_its_tensors() -> None:
    (x, residual, weight, bias, _), _ = draw((64, 768), torch.float32)
    there = [t.to("cuda:1") for t in (x, residual, weight, bias)]
    want = ops.dropout_add_layer_norm(x, residual, weight, bias)
    assert torch.equal(ops.dropout_add_layer_norm(*there).cpu(), want.cpu())


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("optional", [True, False])
def test_opcheck(p: float, optional: bool) -> None:
    inputs, _ = draw((6, 24), torch.float32)
    x, residual, weight, bias, x_bias = (t.requires_grad_() for t in inputs)
    if not optional:
        residual = x_bias = None
    args = (x, x_bias, residual, weight, bias, p, 1e-12, RNG.cuda() if p else None)
    opcheck(torch.ops.bert_unpad.dropout_add_layer_norm, args)


# Values are functions, so that the file can be read where there is no GPU.
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {"x": t["x"].double()}, "x must be float32, bfloat16 or float16"),
        (lambda t: {"residual": t["residual"][:-1]}, "residual must have the shape of x"),
        (lambda t: {"residual": t["residual"].cpu()}, "residual must be on the same device"),
        (lambda t: {"weight": t["weight"].cpu()}, "weight must be on the same device"),
        (lambda t: {"bias": t["bias"][:-1]}, r"bias must have shape \[20\]"),
        (lambda t: {"x_bias": t["bias"].half()}, "x_bias must be float32"),
        (lambda t: {"dropout_p": 1.0}, r"dropout_p must be in \[0, 1\)"),
        (lambda t: {"dropout_p": 0.1, "rng": RNG}, "rng must be on the same device"),
        (lambda t: {"dropout_p": 0.1, "rng": RNG.int().cuda()}, "rng must be int64"),
    ],
)
def test_bad_input_is_named(change, message: str) -> None:
    (x, residual, weight, bias, _), _ = draw((6, 20), torch.float32)
    good = {"x": x, "residual": residual, "weight": weight, "bias": bias}
    with pytest.raises(RuntimeError, match=message):
        ops.dropout_add_layer_norm(**(good | change(good)))


@pytest.mark.large(20)
def test_more_than_2_to_the_31_elements() -> None:
    rows, hidden = 2**21 + 5, 1024
    x = torch.zeros(rows, hidden, dtype=torch.bfloat16, device="cuda")
    x[-5:] = torch.randn(5, hidden, device="cuda")
    (_, _, weight, bias, _), dy = draw((5, hidden), torch.bfloat16)
    op = torch.ops.bert_unpad
    y, _, mean, rstd = op.dropout_add_layer_norm(x, None, None, weight, bias, 0.0, 1e-5, None)
    want = op.dropout_add_layer_norm(x[-5:].clone(), None, None, weight, bias, 0.0, 1e-5, None)
    assert torch.equal(y[-5:], want[0])
    gradient = y.zero_()
    gradient[-5:] = dy
    dx = op.dropout_add_layer_norm_backward(gradient, x, None, None, weight, mean, rstd, 0.0, None)
    saved = (weight, *want[2:], 0.0, None)
    few = op.dropout_add_layer_norm_backward(dy, x[-5:].clone(), None, None, *saved)
    assert torch.equal(dx[0][-5:], few[0])
    assert not dx[0][:-5].any()
    torch.testing.assert_close(dx[3], few[3], rtol=1e-5, atol=1e-5)
