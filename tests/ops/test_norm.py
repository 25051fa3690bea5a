"""Dropout + residual + LayerNorm against the plain reference."""

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from bert_unpad import ops
from tests.support import reference
from tests.support.backends import Backend, unaligned
from tests.support.op_checks import RNG, assert_compiles_to_the_same_bits, results_of
from tests.support.seeds import derived

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAMES = ["y", "dx", "dresidual", "dweight", "dbias", "dx_bias"]
# A lane has no, some or all of its groups of columns; one warp a row, several, and rows for the
# general kernel: odd, and longer than any other takes. A row's gradient has two degrees of freedom
# less than columns: with few of them it may be next to nothing but rounding errors.
SMALL = [
    *[(45, 8), (45, 64), (9, 128), (9, 264), (9, 768), (9, 1000), (9, 1024), (9, 1032), (3, 2056)],
    *[(3, 4096), (45, 7), (3, 4104), (2, 3, 33), (64,), (1, 13), (0, 768), (0, 7)],
]
SHAPES = [
    *(pytest.param(shape, marks=pytest.mark.sanitizer) for shape in SMALL),
    *(pytest.param((70, n), marks=pytest.mark.backends("cpu")) for n in (5, 16, 100, 768)),
    *(
        pytest.param(shape, marks=pytest.mark.backends("cuda"))
        for shape in [
            *[(37, 8), (300, 64), (70_000, 8), (1000, 128), (2049, 256), (2000, 512), (4096, 768)],
            *[(333, 1000), (4097, 1024), (500, 2048), (300, 4096), (40, 5000), (100, 7)],
        ]
    ),
]


def draw(
    shape: tuple[int, ...], dtype: torch.dtype, param_dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], Tensor]:
    """x, residual, weight, bias, x_bias; and the gradient of y."""
    hidden = shape[-1:]
    params = [1 + 0.3 * torch.randn(hidden), torch.randn(hidden), torch.randn(hidden)]
    inputs = [torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)]
    return inputs + [t.to(param_dtype) for t in params], torch.randn(shape).to(dtype)


def run(
    module, inputs: list[Tensor | None], dout: Tensor, p: float = 0.0,
    precision: torch.dtype | None = None, eps: float = 1e-12,
) -> list[Tensor]:  # fmt: skip
    rng = RNG.to(dout.device)

    def function(x, residual, weight, bias, x_bias):
        return module.dropout_add_layer_norm(
            x, residual, weight, bias, dropout_p=p, eps=eps, x_bias=x_bias, rng=rng
        )

    return results_of(function, inputs, dout, precision)


def compare(inputs: list[Tensor | None], dout: Tensor, p: float, eps: float = 1e-12) -> None:
    names = NAMES[:1] + [n for n, x in zip(NAMES[1:], inputs, strict=True) if x is not None]
    reference.assert_as_good_as_pytorch(
        lambda: run(ops, inputs, dout, p, eps=eps),
        lambda precision: run(reference, inputs, dout, p, precision, eps),
        dout.dtype,
        names,
    )


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_the_reference(
    backend: Backend, dtype: torch.dtype, shape: tuple[int, ...], p: float
) -> None:
    torch.manual_seed(derived(shape[-1]))
    compare(*backend.put(draw(shape, dtype)), p)


@pytest.mark.sanitizer
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("hidden", [13, 264])
@pytest.mark.parametrize("missing", [(1,), (4,), (1, 4)], ids=["residual", "x_bias", "both"])
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_optional_inputs(
    backend: Backend, dtype: torch.dtype, missing: tuple[int, ...], hidden: int, p: float
) -> None:
    torch.manual_seed(derived(0))
    inputs, dout = backend.put(draw((20, hidden), dtype))
    compare([None if i in missing else x for i, x in enumerate(inputs)], dout, p)


@pytest.mark.parametrize("hidden", [13, 40, 64])
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_parameters_in_the_dtype_of_x(backend: Backend, dtype: torch.dtype, hidden: int) -> None:
    torch.manual_seed(derived(1))
    compare(*backend.put(draw((21, hidden), dtype, dtype)), 0.1, eps=1e-3)


@pytest.mark.backends("cpu", "cuda")
def test_any_leading_shape_and_many_rows(backend: Backend) -> None:
    torch.manual_seed(derived(2))
    compare(*backend.put(draw((3, 5, 600, 20), torch.float32)), 0.1)


@pytest.mark.sanitizer
def test_addresses_that_do_not_allow_vector_loads(backend: Backend) -> None:
    torch.manual_seed(derived(4))
    (x, *others), dout = backend.put(draw((3, 256), torch.bfloat16))
    assert unaligned(x).data_ptr() % 16 != 0
    compare([unaligned(x), *others], dout, 0.1)
    compare([x, *others], unaligned(dout), 0.1)


@pytest.mark.parametrize("hidden", [60, 64, 128])
def test_large_offset_does_not_cancel(backend: Backend, hidden: int) -> None:
    torch.manual_seed(derived(3))
    inputs, dout = backend.put(draw((9, hidden), torch.float32))
    inputs[0] += 1000.0
    inputs[4] = None
    # Rounding x + residual to fp32 alone costs 1e-4 here; a one-pass variance would cost 1e-1.
    truth = run(reference, inputs, dout, 0.0, torch.float64)
    for a, b in zip(run(ops, inputs, dout), truth, strict=True):
        assert (a - b).abs().max() < 5e-4 * b.abs().max()


def test_eps_counts(backend: Backend) -> None:
    torch.manual_seed(derived(4))
    inputs, dout = backend.put(draw((10, 50), torch.float32))
    compare([x * 1e-3 for x in inputs], dout, 0.0, eps=1e-5)


def test_strided_inputs_and_gradients(backend: Backend) -> None:
    torch.manual_seed(derived(5))
    (x, residual, *others), dout = backend.put(draw((24, 40), torch.float32))
    *strided, gradient = (torch.stack([t, t], -1)[..., 0] for t in (x, residual, dout))
    assert not strided[0].is_contiguous()
    want = run(ops, [x, residual, *others], dout)
    for a, b in zip(run(ops, [*strided, *others], gradient), want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 5)])
def test_no_rows(backend: Backend, shape: tuple[int, ...]) -> None:
    inputs, dout = backend.put(draw(shape, torch.float32))
    y, *gradients = run(ops, inputs, dout, 0.1)
    assert y.shape == shape
    for x, gradient in zip(inputs, gradients, strict=True):
        assert torch.equal(gradient, torch.zeros_like(x))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.99])
@pytest.mark.parametrize(
    ("rows", "hidden", "dtype"),
    [
        *[(11, 520, torch.bfloat16), (11, 1000, torch.bfloat16)],  # 3 and 4 groups a lane
        *((11, n, torch.float32) for n in (13, 72, 1032)),
        pytest.param(300, 512, torch.float32, marks=pytest.mark.backends("cpu", "cuda")),
        pytest.param(500, 2048, torch.float32, marks=pytest.mark.backends("cuda")),
    ],
)
def test_dropout_keeps_the_exact_rate_and_scale(
    backend: Backend, rows: int, hidden: int, dtype: torch.dtype, p: float
) -> None:
    """By the gradient of x beside that of the residual: the same masks on every device."""
    torch.manual_seed(derived(7))
    inputs, dout = backend.put(draw((rows, hidden), dtype))
    _, dx, dresidual, *_ = run(ops, inputs, dout, p)
    mask = reference.row_mask(RNG, p, rows, hidden).to(dx.device)
    assert torch.equal(dx != 0, mask & (dresidual != 0))
    want = dresidual * mask * reference.dropout_scale(p)
    torch.testing.assert_close(dx, want, rtol=max(1e-6, torch.finfo(dtype).eps), atol=1e-9)


def test_nan_stays_in_its_row(backend: Backend) -> None:
    inputs, _ = backend.put(draw((6, 40), torch.float32))
    inputs[0][2, 39] = float("nan")
    y = ops.dropout_add_layer_norm(*inputs[:4])
    assert y[2].isnan().all()
    assert y[[0, 1, 3, 4, 5]].isfinite().all()


@pytest.mark.parametrize(
    "shape",
    [
        *[(15, 13), (15, 64), (15, 520), (15, 1032)],
        pytest.param((500, 96), marks=pytest.mark.backends("cpu", "cuda")),
        *(pytest.param((4097, n), marks=pytest.mark.backends("cuda")) for n in (13, 1024, 2048)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_same_bits_every_time(backend: Backend, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(derived(8))
    inputs, dout = backend.put(draw(shape, dtype))
    backend.assume(multiprocessors=2)
    backend.assert_same_bits(lambda: run(ops, inputs, dout, 0.1))


@pytest.mark.backends("block", "ptx")
@pytest.mark.parametrize(
    ("rows", "hidden", "dtype"),
    [(330, 8, torch.bfloat16), (90, 13, torch.float32), (50, 264, torch.float32)],
)
def test_sums_over_many_blocks(
    backend: Backend, rows: int, hidden: int, dtype: torch.dtype
) -> None:
    """More than are added up at once."""
    torch.manual_seed(derived(9))
    inputs, dout = draw((rows, hidden), dtype)
    backend.assume(multiprocessors=20)
    compare(inputs, dout, 0.1)
    backend.assert_same_bits(lambda: run(ops, inputs, dout, 0.1))


@pytest.mark.backends("cpu", "cuda")
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("optional", [True, False])
def test_opcheck(backend: Backend, p: float, optional: bool) -> None:
    inputs, _ = backend.put(draw((6, 20), torch.float32))
    x, residual, weight, bias, x_bias = (t.requires_grad_() for t in inputs)
    if not optional:
        residual = x_bias = None
    args = (x, x_bias, residual, weight, bias, p, 1e-12, backend.put(RNG) if p else None)
    opcheck(torch.ops.bert_unpad.dropout_add_layer_norm, args)


def test_compiles_without_graph_breaks() -> None:
    inputs, _ = draw((6, 20), torch.bfloat16)
    leaves = [t.requires_grad_() for t in inputs]

    def f(x, residual, weight, bias, x_bias):
        y = ops.dropout_add_layer_norm(
            x * 2, residual, weight, bias, x_bias=x_bias, dropout_p=0.1, rng=RNG
        )
        return y.float().square().sum()

    assert_compiles_to_the_same_bits(f, leaves)


@pytest.mark.backends("cpu", "cuda")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.randn(6, 20).double()}, "x must be float32, bfloat16 or float16"),
        ({"x": torch.randn(())}, r"x must have shape \[..., hidden\]"),
        ({"x": torch.randn(6, 0)}, r"hidden >= 1, got \[6, 0\]"),
        ({"residual": torch.randn(6, 19)}, r"residual must have the shape of x, \[6, 20\]"),
        ({"residual": torch.randn(6, 20).half()}, "residual must have the dtype of x"),
        ({"weight": torch.randn(19)}, r"weight must have shape \[20\], got \[19\]"),
        ({"weight": torch.randn(20).half()}, "weight must be float32 or of the input's dtype"),
        ({"bias": torch.randn(20, 1)}, r"bias must have shape \[20\]"),
        ({"x_bias": torch.randn(21)}, r"x_bias must have shape \[20\]"),
        ({"dropout_p": 1.0}, r"dropout_p must be in \[0, 1\), got 1"),
        ({"dropout_p": 0.1, "rng": torch.zeros(2)}, "rng must be int64"),
        (
            {"dropout_p": 0.1, "rng": torch.zeros(3, dtype=torch.int64)},
            r"rng must have shape \[2\]",
        ),
    ],
)
def test_bad_input_is_named(backend: Backend, change: dict, message: str) -> None:
    good = {
        "x": torch.randn(6, 20),
        "residual": torch.randn(6, 20),
        "weight": torch.randn(20),
        "bias": torch.randn(20),
    }
    with pytest.raises(RuntimeError, match=message):
        ops.dropout_add_layer_norm(**backend.put(good | change))


@pytest.mark.backends("cuda")
@pytest.mark.parametrize("name", ["residual", "weight", "rng"])
def test_another_device_is_named(backend: Backend, name: str) -> None:
    x, residual, weight, bias, _ = draw((6, 20), torch.float32)[0]
    given = {"x": x, "residual": residual, "weight": weight, "bias": bias, "rng": RNG}
    on_device = backend.put(given) | {name: given[name]}
    with pytest.raises(RuntimeError, match=f"{name} must be on the same device"):
        ops.dropout_add_layer_norm(**on_device, dropout_p=0.1)


@pytest.mark.backends("cpu", "cuda")
def test_weight_and_bias_of_different_dtypes_are_refused(backend: Backend) -> None:
    x, weight = backend.put((torch.randn(6, 20).half(), torch.randn(20)))
    with pytest.raises(RuntimeError, match="bias must have the dtype of weight"):
        ops.dropout_add_layer_norm(x, None, weight, weight.half())
