"""Bias + GELU against the plain reference."""

import math

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from bert_unpad import ops
from tests.support import reference
from tests.support.backends import Backend, unaligned
from tests.support.op_checks import assert_compiles_to_the_same_bits, results_of
from tests.support.seeds import derived

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMS = ["none", "tanh"]
# Several rows in a block; wide; not a multiple of a 16-byte vector; one row or column; nothing.
SMALL = [(37, 24), (3, 1040), (19, 13), (1, 40), (2, 3, 40), (33,), (70, 1), (0, 24), (5, 0)]
LARGE = [(70, 64), (70, 65), (70, 127), (70, 3072), (300, 65)]
HUGE = [(1000, 3072), (2049, 4096), (4, 8192), (70_000, 8)]
SHAPES = [
    *SMALL,
    *(pytest.param(shape, marks=pytest.mark.backends("cpu", "cuda")) for shape in LARGE),
    *(pytest.param(shape, marks=pytest.mark.backends("cuda")) for shape in HUGE),
]


def draw(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """x, bias; and the gradient of y."""
    x = (2 * torch.randn(shape)).to(dtype)
    return [x, torch.randn(shape[-1:])], torch.randn(shape).to(dtype)


def compare(inputs: list[Tensor | None], dout: Tensor, approximate: str) -> None:
    reference.assert_as_good_as_pytorch(
        lambda: results_of(lambda x, b: ops.bias_gelu(x, b, approximate=approximate), inputs, dout),
        lambda precision: results_of(
            lambda x, b: reference.bias_gelu(x, b, approximate), inputs, dout, precision
        ),
        dout.dtype,
        ["y", "dx", "dbias"] if inputs[1] is not None else ["y", "dx"],
        sums={"dbias": "dx"},
    )


@pytest.mark.sanitizer
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_the_reference(
    backend: Backend, dtype: torch.dtype, approximate: str, shape: tuple[int, ...]
) -> None:
    """Without a bias, with one in fp32, and in the dtype of x."""
    torch.manual_seed(derived(shape[-1]))
    (x, bias), dout = backend.put(draw(shape, dtype))
    for given in (None, bias, bias.to(dtype)):
        compare([x, given], dout, approximate)


def exact(x: Tensor) -> tuple[Tensor, Tensor]:
    """x Phi(x) and its derivative in float64, without the cancellation of 1 + erf."""
    x = x.double()
    cdf = 0.5 * torch.erfc(-x / math.sqrt(2))
    return x * cdf, cdf + x * torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def tanh_form(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.double()
    k = math.sqrt(2 / math.pi)
    v = 2 * k * (x + 0.044715 * x**3)
    s, complement = torch.sigmoid(v), torch.sigmoid(-v)
    return x * s, s + x * s * complement * 2 * k * (1 + 3 * 0.044715 * x * x)


@pytest.mark.backends("cpu", "block", "ptx")
@pytest.mark.parametrize(("approximate", "truth"), [("none", exact), ("tanh", tanh_form)])
def test_accuracy_over_the_whole_range(backend: Backend, approximate: str, truth) -> None:
    """A GPU's approximations of 2^x and 1/x may be off by an ulp or two more."""
    x = torch.linspace(-16, 16, 40_001, requires_grad=True)
    y = ops.bias_gelu(x, approximate=approximate)
    y.sum().backward()
    value, slope = truth(x.detach())
    bound = 1e-6 if backend.name == "cpu" else 2e-7
    for got, want in ((y.detach(), value), (x.grad, slope)):
        assert ((got - want).abs() / (1 + want.abs())).max() < bound
    # The left tail keeps its relative accuracy, which plain PyTorch's does not.
    tail = (x > -8) & (x < 0)
    assert ((y.detach() - value) / value)[tail].abs().max() < 1e-5


@pytest.mark.backends("cpu", "block", "ptx")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_results_are_rounded_once(backend: Backend, dtype: torch.dtype) -> None:
    """To half a unit in the last place, and a tenth of that for the shorter formula."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = numbers[numbers.isfinite() & (numbers.abs() < 12)].requires_grad_()
    y = ops.bias_gelu(x)
    y.sum().backward()
    value, slope = exact(x.detach())
    unit = torch.finfo(dtype).eps / 2
    normal = value.abs() > torch.finfo(dtype).tiny
    assert (((y.detach() - value) / value).abs()[normal] <= 1.1 * unit).all()
    # The derivative has a zero, at -0.75.
    assert ((x.grad - slope).abs() <= 1.1 * unit * slope.abs() + 2e-5).all()


@pytest.mark.parametrize("approximate", FORMS)
def test_special_values(backend: Backend, approximate: str) -> None:
    values = [math.nan, math.inf, 1e30, -1e30, 40.0, -40.0, 0.0, -0.0, -100.0]
    x = torch.tensor(values * 20, device=backend.device, requires_grad=True)
    y = ops.bias_gelu(x, approximate=approximate)
    y.sum().backward()
    first, slopes = y.tolist()[:9], x.grad.tolist()[:9]
    assert math.isnan(first[0])
    assert math.isnan(slopes[0])
    assert first[1:3] == [math.inf, x[2].item()]
    assert first[3:] == pytest.approx([0.0, 40.0, 0.0, 0.0, 0.0, 0.0], abs=1e-6)
    assert slopes[4:] == pytest.approx([1.0, 0.0, 0.5, 0.5, 0.0], abs=1e-6)


def test_strided_input_and_gradient(backend: Backend) -> None:
    torch.manual_seed(derived(2))
    inputs, dout = backend.put(draw((24, 40), torch.float32))
    x = torch.stack([inputs[0]] * 2, -1)[..., 0]
    gradient = torch.stack([dout] * 2, -1)[..., 0]
    assert not x.is_contiguous()
    a = results_of(ops.bias_gelu, inputs, dout)
    b = results_of(ops.bias_gelu, [x, inputs[1]], gradient)
    for one, other in zip(a, b, strict=True):
        assert torch.equal(one, other)


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", DTYPES)
def test_addresses_that_do_not_allow_vector_loads(backend: Backend, dtype: torch.dtype) -> None:
    (x, bias), dout = backend.put(draw((9, 256), dtype))
    assert unaligned(x).data_ptr() % 16 != 0
    compare([unaligned(x), bias], dout, "none")
    compare([x, unaligned(bias.to(dtype))], dout, "none")


@pytest.mark.parametrize("shape", [(0, 16), (3, 0)])
def test_nothing_to_do(backend: Backend, shape: tuple[int, int]) -> None:
    inputs, dout = backend.put(draw(shape, torch.float32))
    y, dx, dbias = results_of(ops.bias_gelu, inputs, dout)
    assert y.shape == dx.shape == shape
    assert torch.equal(dbias, torch.zeros_like(inputs[1]))


@pytest.mark.parametrize(
    "shape", [(500, 200), pytest.param((4097, 1024), marks=pytest.mark.backends("cuda"))], ids=str
)
def test_same_bits_every_time(backend: Backend, shape: tuple[int, int]) -> None:
    torch.manual_seed(derived(3))
    inputs, dout = backend.put(draw(shape, torch.float32))
    backend.assert_same_bits(lambda: results_of(ops.bias_gelu, inputs, dout))


def test_sums_over_many_blocks(backend: Backend) -> None:
    """More than are added up at once."""
    backend.assume(multiprocessors=7)
    inputs, dout = backend.put(draw((5000, 4), torch.float32))
    compare(inputs, dout, "tanh")


@pytest.mark.backends("cuda")
@pytest.mark.parametrize("approximate", FORMS)
def test_agrees_with_the_cpu(backend: Backend, approximate: str) -> None:
    inputs, dout = draw((50, 200), torch.float32)

    def run(x: Tensor, bias: Tensor) -> Tensor:
        return ops.bias_gelu(x, bias, approximate=approximate)

    on_cpu = results_of(run, inputs, dout)
    for a, b in zip(results_of(run, *backend.put((inputs, dout))), on_cpu, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-5 * b.abs().max().item())


@pytest.mark.backends("cpu", "cuda")
@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_opcheck(backend: Backend, tanh: bool, with_bias: bool) -> None:
    (x, bias), dy = backend.put(draw((6, 20), torch.float32))
    bias = bias if with_bias else None
    opcheck(torch.ops.bert_unpad.bias_gelu_backward, (dy, x, bias, tanh))
    bias = bias.requires_grad_() if with_bias else None
    opcheck(torch.ops.bert_unpad.bias_gelu, (x.requires_grad_(), bias, tanh))


def test_compiles_without_graph_breaks() -> None:
    leaves = [t.requires_grad_() for t in draw((6, 20), torch.bfloat16)[0]]

    def f(x: Tensor, bias: Tensor) -> Tensor:
        return ops.bias_gelu(x * 2, bias).float().square().sum()

    assert_compiles_to_the_same_bits(f, leaves)


@pytest.mark.backends("cpu", "cuda")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.randn(6, 20).double()}, "x must be float32, bfloat16 or float16"),
        ({"x": torch.randn(())}, r"x must have shape \[..., hidden\]"),
        ({"bias": torch.randn(19)}, r"bias must have shape \[20\], got \[19\]"),
        ({"bias": torch.randn(20).half()}, "bias must be float32 or of the input's dtype"),
    ],
)
def test_bad_input_is_named(backend: Backend, change: dict, message: str) -> None:
    good = {"x": torch.randn(6, 20), "bias": torch.randn(20)}
    with pytest.raises(RuntimeError, match=message):
        ops.bias_gelu(**backend.put(good | change))


@pytest.mark.backends("cuda")
def test_another_device_is_named(backend: Backend) -> None:
    with pytest.raises(RuntimeError, match="bias must be on the same device"):
        ops.bias_gelu(backend.put(torch.randn(6, 20)), torch.randn(20))


def test_form_must_be_known() -> None:
    with pytest.raises(ValueError, match='approximate must be "none" or "tanh", got \'erf\''):
        ops.bias_gelu(torch.randn(6, 20), approximate="erf")
