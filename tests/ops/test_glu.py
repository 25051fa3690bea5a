"""Gated linear units against the plain reference."""

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
KINDS = list(reference.GATES)
# Rows and width: several rows in a block; wide; not a multiple of a 16-byte vector; nothing.
SHAPES = [
    *[(37, 24), (3, 1040), (19, 13), (70, 1), (0, 24), (5, 0)],
    *(
        pytest.param(shape, marks=pytest.mark.backends("cpu", "cuda"))
        for shape in [(70, 64), (70, 65), (70, 127), (70, 1152)]
    ),
    *(
        pytest.param(shape, marks=pytest.mark.backends("cuda"))
        for shape in [(300, 65), (1000, 1152), (70_000, 8)]
    ),
]


def draw(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """x [..., 2 * width], bias; and the gradient of y."""
    x = (2 * torch.randn(shape)).to(dtype)
    dout = torch.randn(*shape[:-1], shape[-1] // 2).to(dtype)
    return [x, torch.randn(shape[-1:])], dout


def compare(inputs: list[Tensor | None], dout: Tensor, kind: str) -> None:
    reference.assert_as_good_as_pytorch(
        lambda: results_of(lambda x, b: ops.glu(x, kind, b), inputs, dout),
        lambda precision: results_of(
            lambda x, b: reference.glu(x, kind, b), inputs, dout, precision
        ),
        dout.dtype,
        ["y", "dx", "dbias"] if inputs[1] is not None else ["y", "dx"],
        sums={"dbias": "dx"},
    )


@pytest.mark.sanitizer
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_the_reference(
    backend: Backend, dtype: torch.dtype, kind: str, shape: tuple[int, int]
) -> None:
    """Without a bias, with one in fp32, and in the dtype of x."""
    torch.manual_seed(derived(shape[1]))
    (x, bias), dout = backend.put(draw((shape[0], 2 * shape[1]), dtype))
    for given in (None, bias, bias.to(dtype)):
        compare([x, given], dout, kind)


def test_any_leading_shape(backend: Backend) -> None:
    inputs, dout = backend.put(draw((2, 3, 4, 66), torch.float32))
    compare(inputs, dout, "silu")


def test_addresses_that_do_not_allow_vector_loads(backend: Backend) -> None:
    (x, bias), dout = backend.put(draw((5, 32), torch.bfloat16))
    assert unaligned(x).data_ptr() % 16 != 0
    compare([unaligned(x), bias], dout, "silu")


def test_sums_over_many_blocks(backend: Backend) -> None:
    """More than are added up at once."""
    backend.assume(multiprocessors=7)
    inputs, dout = backend.put(draw((5000, 8), torch.float32))
    compare(inputs, dout, "silu")


def test_the_first_half_is_activated(backend: Backend) -> None:
    y = ops.glu(torch.tensor([[-1.0, 2.0, 10.0, 100.0]], device=backend.device), "relu")
    assert y.tolist() == [[0.0, 200.0]]


@pytest.mark.backends("cpu", "block", "ptx")
@pytest.mark.parametrize("kind", KINDS)
def test_accuracy_over_the_whole_range(backend: Backend, kind: str) -> None:
    a = torch.linspace(-14, 14, 40001)
    x = torch.stack([a, torch.ones_like(a)], -1).requires_grad_()
    y = ops.glu(x, kind)
    y.sum().backward()
    wide = a.double().requires_grad_()
    value = reference.GATES[kind](wide)
    value.sum().backward()
    for got, want in ((y.detach()[:, 0], value.detach()), (x.grad[:, 0], wide.grad)):
        assert ((got - want).abs() / (1 + want.abs())).max() < 1e-6
    assert torch.equal(x.grad[:, 1], y.detach()[:, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_special_values(backend: Backend, kind: str) -> None:
    values = [float("nan"), float("inf"), 1e30, -1e30, 0.0, -100.0]
    a = torch.tensor(values * 20, device=backend.device)
    y = ops.glu(torch.cat([a, torch.ones_like(a)]), kind)[:6]
    assert y[0].isnan()
    assert y[1] == float("inf")
    assert y[2] == a[2]
    assert y[3:].abs().max() < 1e-6


def test_strided_input_and_gradient(backend: Backend) -> None:
    torch.manual_seed(derived(2))
    inputs, dout = backend.put(draw((24, 40), torch.float32))
    x = torch.stack([inputs[0]] * 2, -1)[..., 0]
    gradient = torch.stack([dout] * 2, -1)[..., 0]
    assert not x.is_contiguous()
    f = lambda x, bias: ops.glu(x, "gelu", bias)  # noqa: E731
    for one, other in zip(
        results_of(f, inputs, dout), results_of(f, [x, inputs[1]], gradient), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("shape", [(0, 16), (3, 0), (2, 0, 4)])
def test_nothing_to_do(backend: Backend, shape: tuple[int, ...]) -> None:
    inputs, dout = backend.put(draw(shape, torch.float32))
    y, dx, dbias = results_of(lambda x, b: ops.glu(x, "silu", b), inputs, dout)
    assert y.shape == dout.shape
    assert dx.shape == shape
    assert torch.equal(dbias, torch.zeros_like(inputs[1]))


def test_same_bits_every_time(backend: Backend) -> None:
    torch.manual_seed(derived(3))
    inputs, dout = backend.put(draw((500, 200), torch.float32))
    backend.assert_same_bits(lambda: results_of(lambda x, b: ops.glu(x, "gelu", b), inputs, dout))


@pytest.mark.backends("cuda")
@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_the_cpu(backend: Backend, kind: str) -> None:
    inputs, dout = draw((50, 400), torch.float32)

    def run(x: Tensor, bias: Tensor) -> Tensor:
        return ops.glu(x, kind, bias)

    on_cpu = results_of(run, inputs, dout)
    for a, b in zip(results_of(run, *backend.put((inputs, dout))), on_cpu, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-5 * b.abs().max().item())


@pytest.mark.backends("cpu", "cuda")
@pytest.mark.parametrize("kind", range(4))
@pytest.mark.parametrize("with_bias", [False, True])
def test_opcheck(backend: Backend, kind: int, with_bias: bool) -> None:
    (x, bias), dout = backend.put(draw((6, 20), torch.float32))
    bias = bias if with_bias else None
    opcheck(torch.ops.bert_unpad.glu_backward, (dout, x, bias, kind))
    bias = bias.requires_grad_() if with_bias else None
    opcheck(torch.ops.bert_unpad.glu, (x.requires_grad_(), bias, kind))


def test_compiles_without_graph_breaks() -> None:
    leaves = [t.requires_grad_() for t in draw((6, 20), torch.bfloat16)[0]]

    def f(x: Tensor, bias: Tensor) -> Tensor:
        return ops.glu(x * 2, "silu", bias).float().square().sum()

    assert_compiles_to_the_same_bits(f, leaves)


@pytest.mark.backends("cpu", "cuda")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.randn(6, 20).double()}, "x must be float32, bfloat16 or float16"),
        ({"x": torch.randn(())}, r"x must have shape \[..., 2 \* width\], got \[\]"),
        ({"x": torch.randn(6, 21)}, r"x must have shape \[..., 2 \* width\], got \[6, 21\]"),
        ({"bias": torch.randn(10)}, r"bias must have shape \[20\], got \[10\]"),
        ({"bias": torch.randn(20).half()}, "bias must be float32 or of the input's dtype"),
    ],
)
def test_bad_input_is_named(backend: Backend, change: dict, message: str) -> None:
    good = {"x": torch.randn(6, 20), "kind": "silu", "bias": torch.randn(20)}
    with pytest.raises(RuntimeError, match=message):
        ops.glu(**backend.put(good | change))


def test_kind_must_be_known() -> None:
    message = "glu: kind must be one of gelu, gelu_tanh, silu, relu, got 'swish'"
    with pytest.raises(ValueError, match=message):
        ops.glu(torch.randn(6, 20), "swish")
    with pytest.raises(RuntimeError, match="glu: kind must be between 0 and 3, got 4"):
        torch.ops.bert_unpad.glu(torch.randn(6, 20), None, 4)


def test_a_gradient_of_another_shape_is_named() -> None:
    with pytest.raises(
        RuntimeError, match=r"dy must have the shape of y, \[6, 10\], got \[6, 20\]"
    ):
        torch.ops.bert_unpad.glu_backward(torch.randn(6, 20), torch.randn(6, 20), None, 0)
