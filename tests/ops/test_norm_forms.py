"""LayerNorm without a bias, RMSNorm, both alone, and the sum beside its norm."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from torch.nn import functional

from bert_unpad import ops
from bert_unpad.ops.delayed_scaling import DelayedScaling
from bert_unpad.ops.norm_fp8 import dropout_add_norm_fp8
from tests.support import reference
from tests.support.backends import Backend
from tests.support.op_checks import RNG, assert_compiles_to_the_same_bits, results_of
from tests.support.seeds import derived

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ADD_NORMS = {False: ops.dropout_add_layer_norm, True: ops.dropout_add_rms_norm}
NAMES = ["y", "dx", "dresidual", "dweight", "dx_bias"]


def draw(
    rows: int, hidden: int, dtype: torch.dtype, parameter_dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], Tensor]:
    """x, residual, weight, x_bias; and the gradient of y."""
    weight, x_bias = 1 + 0.3 * torch.randn(hidden), torch.randn(hidden)
    x, residual, dout = torch.randn(3, rows, hidden).to(dtype)
    return [x, residual, weight.to(parameter_dtype), x_bias.to(parameter_dtype)], dout


def add_norm(rms: bool, **settings) -> Callable[..., Tensor | tuple[Tensor, Tensor]]:
    """Of x, residual, weight and x_bias."""
    function = partial(ADD_NORMS[rms], eps=1e-5, **settings)
    return lambda x, residual, weight, x_bias: function(x, residual, weight, x_bias=x_bias)


def plain_add_norm(rms: bool, **settings) -> Callable[..., Tensor | tuple[Tensor, Tensor]]:
    function = partial(reference.dropout_add_layer_norm, eps=1e-5, rms=rms, **settings)
    return lambda x, residual, weight, x_bias: function(x, residual, weight, x_bias=x_bias)


def both(backend: Backend, rms: bool, **settings) -> tuple[Callable, Callable]:
    """The operator and the reference."""
    settings |= {"rng": backend.put(RNG)}
    return add_norm(rms, **settings), plain_add_norm(rms, **settings)


def compare(
    ours: Callable,
    plain: Callable,
    inputs: list[Tensor | None],
    dout: Tensor,
    roundings: int = 1,
) -> None:
    names = NAMES[:1] + [n for n, x in zip(NAMES[1:], inputs, strict=False) if x is not None]
    reference.assert_as_good_as_pytorch(
        lambda: results_of(ours, inputs, dout),
        lambda precision: results_of(plain, inputs, dout, precision),
        dout.dtype,
        names,
        roundings,
    )


SHAPES = [
    *[(7, n) for n in (8, 13, 264, 768, 1032)],
    pytest.param((40, 1024), marks=pytest.mark.backends("cuda")),
]


def on_cpu(*widths: int) -> list:
    return [pytest.param((70, n), marks=pytest.mark.backends("cpu")) for n in widths]


@pytest.mark.sanitizer
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize(
    "shape",
    [*SHAPES, *(pytest.param((70, n), marks=pytest.mark.backends("cpu")) for n in (3, 100))],
)
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_bias(
    backend: Backend, dtype: torch.dtype, rms: bool, shape: tuple[int, int], p: float
) -> None:
    torch.manual_seed(derived(shape[1]))
    inputs, dout = backend.put(draw(*shape, dtype))
    compare(*both(backend, rms, dropout_p=p), inputs, dout)


@pytest.mark.sanitizer
@pytest.mark.parametrize("p", [0.0, 0.1])
# Dropout leaves something of every row, without which fp16 has no gradient.
@pytest.mark.parametrize("shape", [*SHAPES, *on_cpu(5, 33)])
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_and_its_norm(
    backend: Backend, dtype: torch.dtype, rms: bool, shape: tuple[int, int], p: float
) -> None:
    torch.manual_seed(derived(shape[1]))
    inputs, dout = draw(*shape, dtype)
    inputs, dout = backend.put((inputs, torch.cat([dout, torch.randn_like(dout)])))
    ours, plain = both(backend, rms, dropout_p=p, return_sum=True)
    for missing in ((), (1,), (3,), (1, 3)):
        given = [None if i in missing else x for i, x in enumerate(inputs)]
        # The sum is rounded, and then the gradients.
        compare(lambda *t: torch.cat(ours(*t)), lambda *t: torch.cat(plain(*t)), given, dout, 2)


@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("rms", [False, True])
def test_one_of_the_two_results_may_be_unused(backend: Backend, rms: bool, used: int) -> None:
    torch.manual_seed(derived(0))
    inputs, dout = backend.put(draw(9, 40, torch.float32))
    ours, plain = both(backend, rms, return_sum=True)
    leaves = [x.requires_grad_() for x in inputs]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    ours(*leaves)[used].backward(dout)
    plain(*wide)[used].backward(dout.double())
    for x, want in zip(leaves, wide, strict=True):
        expected = torch.zeros_like(want) if want.grad is None else want.grad
        torch.testing.assert_close(x.grad.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rms", [False, True])
def test_what_is_normalised_is_the_sum_that_is_returned(
    backend: Backend, rms: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(derived(1))
    (x, residual, weight, x_bias), _ = backend.put(draw(20, 72, dtype))
    ours, plain = both(backend, rms, dropout_p=0.1, return_sum=True)
    total, y = ours(x, residual, weight, x_bias)
    alone = ops.rms_norm if rms else ops.layer_norm
    rounding = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(y, alone(total, weight, eps=1e-5), rtol=rounding, atol=1e-6)
    exact, _ = plain(*(t.double() for t in (x, residual, weight, x_bias)))
    torch.testing.assert_close(total.double(), exact, rtol=rounding / 3, atol=1e-6)


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_a_chain_of_pre_norm_blocks(backend: Backend, p: float) -> None:
    """The sum goes on as the next block's residual, and gets gradients from both."""
    torch.manual_seed(derived(2))

    def run(function: Callable, x: Tensor, weights: list[Tensor]) -> Tensor:
        total, y = function(x, None, weights[0])
        for weight in weights[1:]:
            total, y = function(y.tanh(), total, weight)
        return y

    x, weights = backend.put((torch.randn(12, 40), [torch.randn(40) for _ in range(4)]))
    results = []
    for module, dtype in ((ops, torch.float32), (reference, torch.float64)):
        function = partial(
            module.dropout_add_layer_norm,
            dropout_p=p,
            rng=backend.put(RNG),
            eps=1e-5,
            return_sum=True,
        )
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in (x, *weights)]
        run(function, leaves[0], leaves[1:]).square().sum().backward()
        results.append([leaf.grad for leaf in leaves])
    for got, want in zip(*results, strict=True):
        assert (got - want).abs().max() < 1e-5 * want.abs().max()


@pytest.mark.parametrize("hidden", [7, 64, 768])
@pytest.mark.parametrize("dtype", DTYPES)
def test_alone(backend: Backend, dtype: torch.dtype, hidden: int) -> None:
    torch.manual_seed(derived(3))
    (x, _, weight, bias), dout = backend.put(draw(10, hidden, dtype))
    x, dout = x.view(2, 5, hidden), dout.view(2, 5, hidden)
    cast = lambda t, like: None if t is None else t.to(like.dtype)  # noqa: E731

    def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.layer_norm(x, (hidden,), cast(weight, x), cast(bias, x), 1e-5)

    def plain_rms(x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (hidden,), cast(weight, x), 1e-6)

    compare(ops.layer_norm, plain, [x, weight, bias], dout)
    compare(ops.layer_norm, plain, [x, weight], dout)
    compare(ops.rms_norm, plain_rms, [x, weight], dout)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rms", [False, True])
def test_parameters_in_the_dtype_of_x(backend: Backend, rms: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(derived(4))
    inputs, _ = backend.put(draw(40, 64, dtype, dtype))
    dout = backend.put(torch.randn(80, 64).to(dtype))
    ours, plain = both(backend, rms, dropout_p=0.1, return_sum=True)
    compare(lambda *t: torch.cat(ours(*t)), lambda *t: torch.cat(plain(*t)), inputs, dout)


def test_the_default_eps_is_pytorchs() -> None:
    """Rows in whose variance it counts."""
    x, weight, bias = 1e-3 * torch.randn(5, 16), torch.randn(16), torch.randn(16)
    want = functional.layer_norm(x, (16,), weight, bias)
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
    close(ops.layer_norm(x, weight, bias), want)
    close(ops.dropout_add_layer_norm(x, None, weight, bias), want)
    close(dropout_add_norm_fp8(x, None, weight, bias, DelayedScaling(1)[0].input).x, want)
    ids, zeros = torch.arange(5), torch.zeros(5, 16)
    close(ops.embedding_layer_norm(*[ids] * 3, x, zeros, zeros, weight, bias), want)
    want = ops.rms_norm(x, weight)
    close(ops.dropout_add_rms_norm(x, None, weight), want)
    fp8 = dropout_add_norm_fp8(x, None, weight, None, DelayedScaling(1)[0].input, rms=True)
    close(fp8.x, want)


@pytest.mark.parametrize("shape", [(8,), [8], torch.Size([8]), 8])
def test_a_normalized_shape_is_refused(shape) -> None:
    x, weight, bias = torch.randn(3, 8), torch.ones(8), torch.zeros(8)
    said = r"weight: expected a tensor \[hidden\], got .*; there is no normalized_shape, x is norm"
    with pytest.raises(TypeError, match=f"^layer_norm: {said}"):
        ops.layer_norm(x, shape, weight, bias)
    with pytest.raises(TypeError, match=f"^rms_norm: {said}"):
        ops.rms_norm(x, shape, weight)


def test_rows_of_one_number(backend: Backend) -> None:
    x, weight = backend.put((torch.tensor([[3.0], [-2.0], [1e-4]]), torch.tensor([5.0])))
    x, weight = x.requires_grad_(), weight.requires_grad_()
    assert not ops.layer_norm(x, weight).any()
    y = ops.rms_norm(x, weight, eps=0.0)
    assert y.flatten().tolist() == pytest.approx([5.0, -5.0, 5.0])
    y.sum().backward()
    assert weight.grad.item() == pytest.approx(1.0, rel=2e-6)
    assert x.grad.abs().max() < 1e-6 * 5 / 1e-4


def test_rms_norm_does_not_subtract_the_mean(backend: Backend) -> None:
    x, weight = backend.put((torch.full((2, 8), 3.0), torch.ones(8)))
    torch.testing.assert_close(ops.rms_norm(x, weight), torch.ones_like(x))
    assert ops.layer_norm(x, weight).abs().max() == 0


def test_rms_norm_of_zeros_is_zero(backend: Backend) -> None:
    x, weight = backend.put((torch.zeros(2, 8), torch.ones(8)))
    y = ops.rms_norm(x.requires_grad_(), weight)
    y.sum().backward()
    assert not y.any()
    torch.testing.assert_close(x.grad, torch.full_like(x, 1e3))


@pytest.mark.parametrize("rms", [False, True])
def test_no_rows(backend: Backend, rms: bool) -> None:
    inputs, _ = backend.put(draw(0, 16, torch.float32))
    leaves = [x.requires_grad_() for x in inputs]
    total, y = both(backend, rms, dropout_p=0.1, return_sum=True)[0](*leaves)
    assert total.shape == y.shape == (0, 16)
    torch.cat([total, y]).sum().backward()
    for x in leaves:
        assert torch.equal(x.grad, torch.zeros_like(x))


def test_strided_inputs_and_gradients(backend: Backend) -> None:
    torch.manual_seed(derived(5))
    inputs, _ = backend.put(draw(24, 40, torch.float32))
    strided = [torch.stack([t, t], -1)[..., 0] for t in inputs[:2]] + inputs[2:]
    assert not strided[0].is_contiguous()
    results = []
    for given in (inputs, strided):
        leaves = [x.detach().requires_grad_() for x in given]
        outputs = add_norm(True, return_sum=True)(*leaves)
        gradient = backend.put(torch.ones(())).expand(24, 40)
        results.append([*outputs, *torch.autograd.grad(outputs, leaves, [gradient, gradient])])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("rms", [False, True])
def test_same_bits_every_time(backend: Backend, rms: bool) -> None:
    torch.manual_seed(derived(6))
    inputs, dout = draw(100, 96, torch.float32)
    inputs, dout = backend.put((inputs, torch.cat([dout, dout])))
    ours, _ = both(backend, rms, dropout_p=0.1, return_sum=True)
    backend.assert_same_bits(lambda: results_of(lambda *t: torch.cat(ours(*t)), inputs, dout))


@pytest.mark.backends("cpu", "cuda")
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("return_sum", [False, True])
@pytest.mark.parametrize("rms", [False, True])
def test_opcheck(backend: Backend, rms: bool, return_sum: bool, p: float) -> None:
    inputs, _ = backend.put(draw(6, 20, torch.float32))
    x, residual, weight, x_bias = (t.requires_grad_() for t in inputs)
    rng = backend.put(RNG) if p else None
    args = (x, x_bias, residual, weight, None, p, 1e-5, rng, rms, return_sum)
    opcheck(torch.ops.bert_unpad.dropout_add_layer_norm, args)


@pytest.mark.parametrize("rms", [False, True])
def test_compiles_without_graph_breaks(rms: bool) -> None:
    leaves = [t.requires_grad_() for t in draw(6, 20, torch.bfloat16)[0]]

    def f(x: Tensor, residual: Tensor, weight: Tensor, x_bias: Tensor) -> Tensor:
        run = add_norm(rms, dropout_p=0.1, rng=RNG, return_sum=True)
        total, y = run(x * 2, residual, weight, x_bias)
        return total.float().square().sum() + y.float().square().sum()

    assert_compiles_to_the_same_bits(f, leaves)


@pytest.mark.backends("cpu", "cuda")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.randn(6, 20).double()}, "x must be float32, bfloat16 or float16"),
        ({"x": torch.randn(6, 0)}, r"hidden >= 1, got \[6, 0\]"),
        ({"weight": torch.randn(19)}, r"weight must have shape \[20\], got \[19\]"),
        ({"weight": torch.randn(20).half()}, "weight must be float32 or of the input's dtype"),
    ],
)
@pytest.mark.parametrize("function", [ops.layer_norm, ops.rms_norm])
def test_bad_input_is_named(
    backend: Backend, function: Callable, change: dict, message: str
) -> None:
    good = {"x": torch.randn(6, 20), "weight": torch.randn(20)}
    with pytest.raises(RuntimeError, match=f"^{function.__name__}: .*{message}"):
        function(**backend.put(good | change))


@pytest.mark.backends("cpu", "cuda")
def test_gradients_of_another_shape_are_named(backend: Backend) -> None:
    x, weight, rstd = backend.put((torch.randn(6, 20), torch.randn(20), torch.ones(6)))
    run = torch.ops.bert_unpad.dropout_add_norm_sum_backward
    rest = (None, weight, None, rstd, 0.0, None, False, False)
    with pytest.raises(RuntimeError, match=r"dsum must have the shape of sum, \[6, 20\]"):
        run(x, x[:5], x, *rest)
    with pytest.raises(RuntimeError, match="dy must have the dtype of sum"):
        run(x.half(), None, x, *rest)
    with pytest.raises(RuntimeError, match=r"rstd must have shape \[rows\]"):
        run(x, x, x, None, weight, None, rstd[:5], 0.0, None, False, False)


def test_a_gradient_that_is_not_there():
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            return None

    x, weight = torch.randn(3, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    Nothing.apply(ops.layer_norm(x, weight)).sum().backward()
    assert x.grad is None or not x.grad.any()
