"""The feed-forward half of a layer, against plain formulas."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from bert_unpad import ops
from bert_unpad.ops import matmul
from tests.support import reference
from tests.support.backends import Backend
from tests.support.linear_cases import draw, gradients, leaves, plain_linear
from tests.support.reference import assert_as_good_as_pytorch

CPU, CUDA = pytest.mark.backends("cpu"), pytest.mark.backends("cuda")
LOW = (torch.bfloat16, torch.float16)
# fp32 products are PyTorch's on a GPU.
DTYPES = [pytest.param(torch.float32, marks=CPU), *LOW]
FORMS = ["none", "tanh"]
SIZES = (48, 96)


def plain_mlp(x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, form: str) -> Tensor:
    return plain_linear(F.gelu(plain_linear(x, weight1, bias1), approximate=form), weight2, None)


MLP_ROUNDINGS = 4  # in a gradient: of the inner product, of its gradient with and without act, own


def draw_mlp(rows: int, dtype: torch.dtype, low: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """x, weights, bias; and the gradients of both results."""
    hidden, inner = SIZES
    x, weight1, bias1, weight2, dy, residual = draw(
        (rows, hidden), (inner, hidden), (inner,), (32, inner), (rows, 32), (rows, hidden), seed=1
    )
    given = [x.to(dtype), (weight1 / 4).to(low), bias1.to(low), (weight2 / 4).to(low)]
    return given, [dy.to(dtype), residual.to(dtype)]


@pytest.mark.sanitizer
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("low_weights", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 37, pytest.param(300, marks=CUDA)])
def test_mlp(
    backend: Backend, fused: bool, rows: int, dtype: torch.dtype, low_weights: bool, form: str
) -> None:
    given, douts = backend.put(draw_mlp(rows, dtype, dtype if low_weights else torch.float32))
    compare_mlp(given, douts, form)


@pytest.mark.parametrize("form", FORMS)
def test_the_epilogues_gelu_is_the_formula(
    backend: Backend, fused: bool, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuBLASLt documents "GELU" only; that it is the tanh approximation shows at |u| = 2 to 4."""
    monkeypatch.setattr("bert_unpad.ops.feed_forward._epilogue_pays", lambda device: True)
    given, douts = backend.put(draw_mlp(70, torch.float16, torch.float32))
    given[1] *= 2
    compare_mlp(given, douts, form)


def compare_mlp(given: list[Tensor], douts: list[Tensor], form: str) -> None:

    def ours():
        inputs = leaves(given)
        return gradients(ops.mlp(*inputs, approximate=form), douts, inputs)

    def plain(precision: torch.dtype):
        inputs = leaves(given, torch.float64 if precision == torch.float64 else None)
        return gradients((plain_mlp(*inputs, form), inputs[0] * 1), douts, inputs)

    names = ["y", "residual", "dx", "dweight1", "dbias1", "dweight2"]
    assert_as_good_as_pytorch(ours, plain, given[0].dtype, names, MLP_ROUNDINGS)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, *LOW])
def test_recomputing_the_gelu_changes_no_bit(dtype: torch.dtype, form: str) -> None:
    given, douts = draw_mlp(19, dtype, torch.float32)
    results = []
    for recompute in (False, True):
        inputs = leaves(given)
        outputs = ops.mlp(*inputs, approximate=form, recompute=recompute)
        with torch.autocast("cpu", torch.bfloat16):  # some run the backward pass within autocast
            results.append(gradients(outputs, douts, inputs))
    for kept, again in zip(*results, strict=True):
        assert torch.equal(kept, again)


@pytest.mark.parametrize("frozen", [{0}, {1}, {2}, {3}, {0, 1}, {1, 2}, {0, 1, 2}])
def test_mlp_leaves_out_what_nobody_asks_for(
    backend: Backend, fused: bool, frozen: set[int]
) -> None:
    dtype = torch.float32 if backend.name == "cpu" else torch.float16
    given, douts = backend.put(draw_mlp(5, dtype, torch.float32))
    everything = leaves(given)
    gradients(ops.mlp(*everything, approximate="tanh"), douts, everything)
    some = leaves(given)
    for i in frozen:
        some[i].requires_grad_(False)
    outputs = ops.mlp(*some, approximate="tanh")
    torch.autograd.backward(outputs[0], douts[0])
    assert [i for i, t in enumerate(some) if t.grad is None] == sorted(frozen)
    for got, want in zip(some[1:], everything[1:], strict=True):
        if got.grad is not None:
            torch.testing.assert_close(got.grad, want.grad)


GLU_NAMES = ["y", "residual", "dx", "dweight1", "dweight2", "dbias1"]


def draw_glu_mlp(rows: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """As draw_mlp, with a first weight and bias for both halves, and the bias last."""
    (x, _, _, weight2), douts = draw_mlp(rows, dtype, torch.float32)
    weight1, bias1 = draw((2 * SIZES[1], SIZES[0]), (2 * SIZES[1],), seed=2)
    return [x, weight1 / 4, weight2, bias1], douts


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", reference.GATES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 37])
def test_glu_mlp(
    backend: Backend, fused: bool, rows: int, dtype: torch.dtype, kind: str, bias: bool
) -> None:
    given, douts = backend.put(draw_glu_mlp(rows, dtype))
    if kind == "relu":
        # Sums of at most 49 of 1, 0 and -1 are exact in every dtype: of other sums the rounding can
        # lie on the other side of 0, where the gradient is another altogether.
        for i, scale in ((0, 1), (1, 4), (3, 1)):
            given[i] = (scale * given[i]).round().clamp(-1, 1)
    given = given if bias else given[:3]

    def run(function, inputs):
        x, weight1, weight2, *bias1 = inputs
        return gradients(function(x, weight1, *(bias1 or [None]), weight2), douts, inputs)

    def plain_glu_mlp(x, weight1, bias1, weight2):
        inner = reference.glu(plain_linear(x, weight1, bias1), kind)
        return plain_linear(inner, weight2, None), x * 1

    def plain(precision: torch.dtype):
        wide = torch.float64 if precision == torch.float64 else None
        return run(plain_glu_mlp, leaves(given, wide))

    def ours(recompute: bool = False):
        glu_mlp = partial(ops.glu_mlp, kind=kind, recompute=recompute)
        return run(glu_mlp, leaves(given))

    assert_as_good_as_pytorch(ours, plain, dtype, GLU_NAMES[: len(given) + 2], MLP_ROUNDINGS)
    for kept, again in zip(ours(), ours(recompute=True), strict=True):
        assert torch.equal(kept, again)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_glu_mlp_compiles(recompute, fp8) -> None:
    (x, weight1, weight2, bias1), douts = draw_glu_mlp(7, torch.float32)
    function = partial(ops.glu_mlp, kind="gelu", recompute=recompute, fp8=fp8)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = []
    for f in (function, compiled):
        inputs = leaves([x, weight1, bias1, weight2])
        results.append(gradients(f(*inputs), douts, inputs))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_mlp_without_a_bias(backend: Backend, fused: bool) -> None:
    dtype = torch.float32 if backend.name == "cpu" else torch.float16
    given, douts = backend.put(draw_mlp(9, dtype, torch.float32))
    for form in FORMS:
        results = []
        for bias in (None, backend.put(torch.zeros(SIZES[1]))):
            inputs = leaves([given[0], given[1], bias, given[3]])
            outputs = ops.mlp(*inputs, approximate=form)
            torch.autograd.backward(outputs, douts)
            results.append([*outputs, *(inputs[i].grad for i in (0, 1, 3))])
        for got, want in zip(*results, strict=True):
            assert torch.equal(got, want)


def test_only_the_residual_may_be_used() -> None:
    given, douts = draw_mlp(5, torch.float32, torch.float32)
    inputs = leaves(given)
    ops.mlp(*inputs)[1].backward(douts[1])
    assert torch.equal(inputs[0].grad, douts[1])
    assert inputs[1].grad is None


@pytest.mark.parametrize("recompute", [False, True])
def test_mlp_compiles(recompute) -> None:
    """A compiler would join equal nodes of the two passes; AOTAutograd's graphs show what it has
    kept: the GELU in both only where it is to be computed again."""
    graphs = []

    def keep(module: torch.fx.GraphModule, _inputs) -> torch.fx.GraphModule:
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    def run(function, inputs):
        return gradients(function(*inputs, recompute=recompute), douts, inputs)

    given, douts = draw_mlp(7, torch.float32, torch.float32)
    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition
    )
    compiled = torch.compile(ops.mlp, fullgraph=True, backend=backend, dynamic=True)
    for got, want in zip(run(compiled, leaves(given)), run(ops.mlp, leaves(given)), strict=True):
        torch.testing.assert_close(got, want)
    operators = [[str(node.target) for node in graph.nodes] for graph in graphs]
    gelus = [names.count("bert_unpad.bias_gelu.default") for names in operators]
    assert gelus == [1, 1 if recompute else 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_adds_to_the_gradient_that_is_there(
    backend: Backend, fused: bool, dtype: torch.dtype
) -> None:
    given, douts = backend.put(draw_mlp(9, dtype, torch.float32))
    plain, added = leaves(given), leaves(given)
    for weight in (added[1], added[3]):
        ops.accumulate_in_place(weight)
    places = []
    for _ in range(3):
        for inputs in (plain, added):
            torch.autograd.backward(ops.mlp(*inputs), douts)
        places.append((added[1].grad.data_ptr(), added[3].grad.data_ptr()))
    assert places[0] == places[1] == places[2]
    for got, want in zip(added, plain, strict=True):
        torch.testing.assert_close(got.grad, want.grad)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_gradient_of_a_pass_can_take_the_place_of_what_is_there(
    backend: Backend, fused: bool, dtype: torch.dtype
) -> None:
    given, douts = backend.put(draw_mlp(9, dtype, torch.float32))
    plain, written = leaves(given), leaves(given)
    weights = [written[1], written[3]]
    for weight in weights:
        ops.accumulate_in_place(weight)
        weight.grad = torch.full_like(weight, torch.nan)
    with matmul.InPlaceGradients(weights) as products:
        for inputs in (plain, written):  # twice: the second time they are added
            for _ in range(2):
                torch.autograd.backward(ops.mlp(*inputs), douts)
    assert {id(weight) for weight in products.weights} == {id(weight) for weight in weights}
    for got, want in zip(written, plain, strict=True):
        torch.testing.assert_close(got.grad, want.grad)


def test_bad_input() -> None:
    x, weight1, weight2 = draw((5, 24), (40, 24), (16, 40))
    bias1 = torch.zeros(40)
    with pytest.raises(ValueError, match=r"mlp: x must have shape \[rows, features\]"):
        ops.mlp(x[None], weight1, bias1, weight2)
    with pytest.raises(ValueError, match=r"mlp: expected weight2 \[out_features, 40\]"):
        ops.mlp(x, weight1, bias1, weight1)
    with pytest.raises(ValueError, match=r"^mlp: expected x .* and weight1 .*, got \[0, 7\] and"):
        ops.mlp(x[:0, :7], weight1, bias1, weight2)
    with pytest.raises(ValueError, match=r"^mlp: bias1 must have shape \[40\], got \[3\]"):
        ops.mlp(x, weight1, bias1[:3], weight2)
    with pytest.raises(ValueError, match=r"^glu_mlp: weight1 must be torch.float32 like x or"):
        ops.glu_mlp(x, weight1.half(), bias1, weight2)
    with pytest.raises(ValueError, match=r"glu_mlp: x must have shape \[rows, features\]"):
        ops.glu_mlp(x[None], weight1, bias1, weight2)
    with pytest.raises(ValueError, match=r"glu_mlp: expected weight2 \[out_features, 20\]"):
        ops.glu_mlp(x, weight1, bias1, weight2)
    with pytest.raises(
        ValueError, match=r"weight1 must have shape \[2 \* intermediate, features\]"
    ):
        ops.glu_mlp(x, weight1[:39], bias1[:39], weight2)
    with pytest.raises(ValueError, match=r"glu_mlp: kind must be one of gelu, .*, got 'erf'"):
        ops.glu_mlp(x, weight1, bias1, weight2[:, :20], kind="erf")
    with pytest.raises(ValueError, match='approximate must be "none" or "tanh"'):
        ops.mlp(x, weight1, bias1, weight2, approximate="erf")
