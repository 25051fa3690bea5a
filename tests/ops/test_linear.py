"""Linear layers and the feed-forward half, against plain formulas.

The parts that only a GPU takes (products with epilogues) run here too: on a CPU the operators
behind them are PyTorch's products, so what autograd makes of them can be compared.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.library import opcheck
from torch.nn.parallel import DistributedDataParallel

from bert_unpad import ops
from bert_unpad.ops import matmul
from tests.support import processes as mp
from tests.support import reference
from tests.support.reference import assert_as_good_as_pytorch
from tests.support.seeds import derived

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMS = ["none", "tanh"]
SIZES = (48, 96)


@pytest.fixture(params=[False, True], ids=["plain", "fused"])
def fused(request, monkeypatch) -> bool:
    """Whether products are those of a GPU, with their epilogues."""
    if request.param:
        monkeypatch.setattr(matmul, "fused", lambda x, weight: True)
    return request.param


def leaves(tensors: list[Tensor | None], dtype: torch.dtype | None = None) -> list[Tensor | None]:
    """Copies that want gradients, in `dtype` or as they are."""
    return [
        None if t is None else t.detach().to(dtype or t.dtype, copy=True).requires_grad_()
        for t in tensors
    ]


def gradients(outputs: tuple[Tensor, ...], douts: list[Tensor], inputs: list[Tensor | None]):
    torch.autograd.backward(outputs, [d.to(o.dtype) for d, o in zip(douts, outputs, strict=True)])
    return [*(o.detach() for o in outputs), *(t.grad for t in inputs if t is not None)]


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """In x's dtype, as autocast has it."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def draw(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(derived(seed))
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("low_weights", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [(0,), (1,), (37,), (3, 5)])
def test_linear(fused, rows, dtype, low_weights, bias) -> None:
    x, weight, b, dy, residual = draw(
        (*rows, SIZES[0]), (SIZES[1], SIZES[0]), (SIZES[1],), (*rows, SIZES[1]), (*rows, SIZES[0])
    )
    low = dtype if low_weights else torch.float32
    given = [x.to(dtype), weight.to(low), b.to(low) if bias else None]
    names = ["y", "residual", "dx", "dweight", "dbias"]

    def ours():
        inputs = leaves(given)
        return gradients(ops.linear_residual(*inputs), [dy, residual], inputs)

    def plain(precision: torch.dtype):
        inputs = leaves(given, torch.float64 if precision == torch.float64 else None)
        return gradients((plain_linear(*inputs), inputs[0] * 1), [dy, residual], inputs)

    # In dx of the product, and of its sum with the residual's gradient.
    assert_as_good_as_pytorch(ours, plain, dtype, names[: 5 if bias else 4], roundings=2)
    # Alone it is the same, without the residual's gradient.
    inputs, alone = leaves(given), leaves(given)
    both = gradients(ops.linear_residual(*inputs), [dy, torch.zeros_like(x)], inputs)
    one = gradients((ops.linear(*alone),), [dy], alone)
    for got, want in zip(one, [both[0], *both[2:]], strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("low_weights", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 37])
def test_mlp(fused, rows, dtype, low_weights, form) -> None:
    given, douts = draw_mlp(rows, dtype, dtype if low_weights else torch.float32)

    def ours():
        inputs = leaves(given)
        return gradients(ops.mlp(*inputs, approximate=form), douts, inputs)

    def plain(precision: torch.dtype):
        inputs = leaves(given, torch.float64 if precision == torch.float64 else None)
        return gradients((plain_mlp(*inputs, form), inputs[0] * 1), douts, inputs)

    names = ["y", "residual", "dx", "dweight1", "dbias1", "dweight2"]
    assert_as_good_as_pytorch(ours, plain, dtype, names, MLP_ROUNDINGS)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_recomputing_the_gelu_changes_no_bit(dtype, form) -> None:
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
def test_mlp_leaves_out_what_nobody_asks_for(fused, frozen) -> None:
    given, douts = draw_mlp(5, torch.float32, torch.float32)
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
def test_glu_mlp(fused, rows, dtype, kind, bias) -> None:
    given, douts = draw_glu_mlp(rows, dtype)
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


def test_mlp_without_a_bias(fused) -> None:
    given, douts = draw_mlp(9, torch.float32, torch.float32)
    for form in FORMS:
        results = []
        for bias in (None, torch.zeros(SIZES[1])):
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators(dtype) -> None:
    x, weight, bias, dy, pre = (
        t.to(dtype) for t in draw((5, 16), (8, 16), (8,), (5, 8), (5, 16), seed=2)
    )
    for gelu in (False, True):
        opcheck(torch.ops.bert_unpad.linear.default, (x, weight, bias, gelu))
    for addend, argument in ((None, None), (x, None), (None, pre)):
        opcheck(torch.ops.bert_unpad.linear_dgrad.default, (dy, weight, addend, argument))
    for with_bias in (False, True):
        opcheck(torch.ops.bert_unpad.linear_wgrad.default, (dy, x, with_bias, torch.float32))
        dweight = torch.randn(8, 16)
        for accumulate in (False, True):
            operands = (dy, x, dweight, accumulate, with_bias)
            opcheck(torch.ops.bert_unpad.linear_wgrad_.default, operands)


class TestAccumulation:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_adds_to_the_gradient_that_is_there(self, fused, dtype) -> None:
        given, douts = draw_mlp(9, dtype, torch.float32)
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
        self, fused, dtype
    ) -> None:
        given, douts = draw_mlp(9, dtype, torch.float32)
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

    def test_what_no_product_writes_is_named(self) -> None:
        weight = torch.zeros(16, 8, requires_grad=True)
        with (
            pytest.raises(
                RuntimeError, match=r"^first: expected weights .* others of \[\[16, 8\]\]"
            ),
            matmul.InPlaceGradients([weight]),
        ):
            pass
        with (
            matmul.InPlaceGradients(),
            pytest.raises(RuntimeError, match="expected one block at a time"),
            matmul.InPlaceGradients(),
        ):
            pass
        assert matmul.InPlaceGradients.current is None

    def test_can_be_taken_back(self) -> None:
        x, weight = draw((3, 8), (16, 8))
        weight.requires_grad_()
        ops.accumulate_in_place(weight)
        ops.linear_residual(x, weight)[0].sum().backward()
        seen = []
        weight.register_hook(seen.append)
        ops.linear_residual(x, weight)[0].sum().backward()
        assert seen == [None]  # it was added without autograd
        ops.accumulate_in_place(weight, False)
        ops.linear_residual(x, weight)[0].sum().backward()
        torch.testing.assert_close(weight.grad, 3 * seen[1])

    def test_goes_straight_into_the_buckets_of_ddp(self) -> None:
        first, second = mp.run_ranks(ddp_gradients, 2)
        for got, want in zip(first, second, strict=True):
            assert torch.equal(got, want)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(derived(0))
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y, residual = ops.mlp(x, self.inner.weight, self.inner.bias, self.outer.weight)
        return (y + residual).square().sum()


def ddp_gradients(rank: int, world_size: int) -> list[Tensor]:
    """Two steps of two passes each: gradients averaged in place are those of plain autograd."""
    results = []
    for in_place in (False, True):
        layer = Layer()
        for weight in (layer.inner.weight, layer.outer.weight):
            ops.accumulate_in_place(weight, in_place)
        replica = DistributedDataParallel(layer, gradient_as_bucket_view=True)
        torch.manual_seed(derived(1 + rank))
        places = set()
        for _ in range(3):
            for parameter in layer.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()
            with replica.no_sync():
                replica(torch.randn(4, 8)).backward()
            replica(torch.randn(4, 8)).backward()
            places.add(layer.inner.weight.grad.data_ptr())
        results.append([parameter.grad.clone() for parameter in layer.parameters()])
        assert len(places) <= 2  # DDP lays its buckets anew once, after the first step
    for plain, added in zip(*results, strict=True):
        torch.testing.assert_close(added, plain)
    return results[1]


def test_bad_input() -> None:
    x, weight1, weight2 = draw((5, 24), (40, 24), (16, 40))
    bias1 = torch.zeros(40)
    with pytest.raises(ValueError, match=r"^linear_residual: expected x \[..., in_features\] and"):
        ops.linear_residual(x, weight2)
    with pytest.raises(ValueError, match=r"bias must have shape \[40\], got \[3\]"):
        ops.linear(x, weight1, torch.zeros(3))
    with pytest.raises(ValueError, match=r"weight must be torch.bfloat16 like x or torch.float32"):
        ops.linear(x.bfloat16(), weight1.half())
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


def test_what_timing_refuses(tmp_path) -> None:
    with pytest.raises(TypeError, match=r"^enabled: expected a bool, got '.*algorithms.txt'"):
        ops.time_algorithms(str(tmp_path / "algorithms.txt"))
    with pytest.raises(ValueError, match=r"^path: expected None where enabled is False, got '"):
        ops.time_algorithms(False, path=tmp_path / "algorithms.txt")


def test_the_switch(monkeypatch) -> None:
    matmul._cublaslt_wanted.cache_clear()
    monkeypatch.setenv("BERT_UNPAD_CUBLASLT", "no")
    with pytest.raises(ValueError, match="BERT_UNPAD_CUBLASLT: expected 0 or 1, got 'no'"):
        matmul._cublaslt_wanted()
    monkeypatch.setenv("BERT_UNPAD_CUBLASLT", "0")
    assert not matmul._cublaslt_wanted()
    matmul._cublaslt_wanted.cache_clear()
