"""A whole encoder layer as one operator, against fp64, in fp32 and with weights in 8 bits."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from bert_unpad import _C, ops
from bert_unpad.ops.encoder_layer import (
    LINEARS,
    Affine,
    LayerParameters,
    LayerShape,
    encoder_finish,
    encoder_layers,
    encoder_project,
    pack_weight,
)
from tests.support.op_checks import results_of_every_isa
from tests.support.processes import run_with
from tests.support.seeds import derived

ACTIVATIONS = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "relu": functional.relu,
}
LENGTHS = ([5], [16], [1, 0, 26, 3], [40, 9, 64], [130, 260, 77, 1, 33])
"""Few rows; more than are multiplied without packing; more than a block has."""
Linear = Callable[[Tensor, Affine], Tensor]


def make(
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 4,
    head_dim: int = 16,
    intermediate: int = 96,
    gated: bool = False,
    norms_first: bool = False,
    rms: bool = False,
    biases: bool = True,
    **more,
) -> tuple[LayerParameters, LayerShape]:
    def affine(rows: int, columns: int | None = None) -> Affine:
        weight = torch.rand(rows) + 0.5
        if columns is not None:
            weight = torch.randn(rows, columns) / columns**0.5
        return Affine(weight, torch.randn(rows) / 4 if biases else None)

    width, kv = heads * head_dim, kv_heads * head_dim
    parameters = LayerParameters(
        query=affine(width, hidden),
        key=affine(kv, hidden),
        value=affine(kv, hidden),
        attention_out=affine(hidden, width),
        ffn_in=affine(intermediate, hidden),
        ffn_gate=affine(intermediate, hidden) if gated else None,
        ffn_out=affine(hidden, intermediate),
        norms=(
            affine(hidden) if norms_first else None,
            affine(hidden),
            None if norms_first else affine(hidden),
        ),
    )
    if rms:
        norms = tuple(None if n is None else Affine(n.weight, None) for n in parameters.norms)
        parameters = replace(parameters, norms=norms)
    eps = (1e-3, 1e-2, 1e-1)  # of each norm its own
    shape = LayerShape(heads, kv_heads, head_dim, intermediate, "gelu", rms, norms_first, eps)
    return parameters, shape._replace(**more)


def inputs(lengths: list[int], hidden: int = 64) -> tuple[Tensor, Tensor, int]:
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return torch.randn(sum(lengths), hidden), cu_seqlens, max(lengths)


def exact(x: Tensor, layer: Affine) -> Tensor:
    y = x @ layer.weight.double().T
    return y if layer.bias is None else y + layer.bias.double()


def rounded(x: Tensor, layer: Affine) -> Tensor:
    """The same with both in 8 bits, by the formulas of csrc/encoder/layer.h."""
    weight = layer.weight.double()
    scales = weight.abs().amax(1, keepdim=True) / 127
    weight = (weight / scales).round() * scales
    low, high = x.amin(1, keepdim=True).clamp(max=0), x.amax(1, keepdim=True).clamp(min=0)
    scale = (high - low) / 255
    zero = (-low / scale).round()
    x = ((x / scale).round() + zero).clamp(0, 255).sub(zero) * scale
    return exact(x, Affine(weight, layer.bias))


def rotated(x: Tensor, positions: Tensor, theta: float, scale: float) -> Tensor:
    half = x.shape[-1] // 2
    angles = positions.double()[:, None] * scale * theta ** (-torch.arange(half) / half).double()
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def normalised(x: Tensor, norm: Affine | None, rms: bool, eps: float) -> Tensor:
    if norm is None:
        return x
    weight = norm.weight.double()
    if rms:
        return functional.rms_norm(x, weight.shape, weight, eps)
    bias = None if norm.bias is None else norm.bias.double()
    return functional.layer_norm(x, weight.shape, weight, bias, eps)


def reference(
    x: Tensor,
    cu_seqlens: Tensor,
    p: LayerParameters,
    s: LayerShape,
    linear: Linear = exact,
    attention: torch.dtype = torch.float64,
) -> Tensor:
    """The layer in fp64, with what attention reads and writes in a dtype."""
    x = x.double()
    lengths = cu_seqlens.diff().tolist()
    y = normalised(x, p.norms[0], s.rms, s.eps[0])
    q, k, v = (
        linear(y, layer).unflatten(1, (-1, s.head_dim)) for layer in (p.query, p.key, p.value)
    )
    if s.rotary[0]:
        positions = torch.cat([torch.arange(n) for n in lengths])
        q, k = (rotated(t, positions, *s.rotary) for t in (q, k))
    q, k, v = (t.to(attention).double() for t in (q, k, v))
    k, v = (t.repeat_interleave(s.heads // s.kv_heads, 1) for t in (k, v))
    mixed = []
    for q_, k_, v_ in zip(*(t.split(lengths) for t in (q, k, v)), strict=True):
        n = q_.shape[0]
        scores = torch.einsum("qhd,khd->hqk", q_, k_) / s.head_dim**0.5
        distance = torch.arange(n) - torch.arange(n)[:, None]
        before, after = (n if side < 0 else side for side in s.window)
        seen = (distance >= -before) & (distance <= after)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        mixed.append(torch.einsum("hqk,khd->qhd", weights, v_).flatten(1))
    total = x + linear(torch.cat(mixed).to(attention).double(), p.attention_out)
    middle = normalised(total, p.norms[1], s.rms, s.eps[1])
    hidden = ACTIVATIONS[s.activation](linear(middle, p.ffn_in))
    if p.ffn_gate is not None:
        hidden = hidden * linear(middle, p.ffn_gate)
    residual = total if s.norms_first else middle
    return normalised(residual + linear(hidden, p.ffn_out), p.norms[2], s.rms, s.eps[2])


def to_int8(p: LayerParameters) -> LayerParameters:
    found = {name: getattr(p, name) for name in LINEARS}
    return replace(
        p,
        **{
            name: linear and Affine(pack_weight(linear.weight, torch.int8), linear.bias)
            for name, linear in found.items()
        },
    )


FORMS = {
    "BERT's": {},
    "without biases": {"biases": False},
    "gated": {"gated": True, "activation": "silu"},
    "ReLU": {"activation": "relu"},
    "norms first": {"norms_first": True, "activation": "gelu_tanh"},
    "ModernBERT's": {
        **{"gated": True, "norms_first": True, "biases": False},
        **{"window": (6, 3), "rotary": (10000.0, 1.0)},
    },
    "EuroBERT's": {
        **{"gated": True, "norms_first": True, "rms": True, "biases": False, "kv_heads": 2},
        **{"rotary": (250000.0, 0.5), "activation": "silu"},
    },
    "other sizes": {"hidden": 160, "heads": 4, "kv_heads": 4, "head_dim": 24, "intermediate": 544},
}


def run(
    x: Tensor, cu_seqlens: Tensor, longest: int, p: LayerParameters, s: LayerShape, **more
) -> Tensor:
    if s.rotary[0]:
        lengths = cu_seqlens.diff().tolist()
        more["positions"] = torch.cat([torch.arange(n) for n in lengths])
    return encoder_layers(x, cu_seqlens, longest, p.tensors(), [s], **more)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_equals_plain_pytorch(form: str, lengths: list[int]) -> None:
    p, s = make(**FORMS[form])
    x, cu_seqlens, longest = inputs(lengths, p.query.weight.shape[1])
    want = reference(x, cu_seqlens, p, s)
    # Some hundred roundings, of numbers that norms and softmax may make a few times larger.
    assert (run(x, cu_seqlens, longest, p, s) - want).abs().max() < 2e-5 * want.abs().max()


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_in_8_bits(form: str, lengths: list[int]) -> None:
    p, s = make(**FORMS[form])
    x, cu_seqlens, longest = inputs(lengths, p.query.weight.shape[1])
    y = run(x, cu_seqlens, longest, to_int8(p), s).double()
    narrow = _C.cpu_isa() == "amx" or _C.fast_bf16_dot_products()
    want = reference(x, cu_seqlens, p, s)
    same = reference(*(x, cu_seqlens, p, s, rounded), torch.bfloat16 if narrow else torch.float64)
    lost, apart = (same - want).norm(), (y - same).norm()
    # Two ways to round that have nothing in common would be 1.4 times as far apart as each is off.
    # Numbers near to the middle of two steps are rounded otherwise in fp32; with attention in bf16
    # more are, as its weights are rounded too.
    assert apart < (0.9 if narrow else 0.4) * lost
    assert 0 < lost < 0.03 * want.norm()


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_some_rows(lengths: list[int], int8: bool) -> None:
    p, s = make()
    p = to_int8(p) if int8 else p
    x, cu_seqlens, longest = inputs(lengths)
    whole = run(x, cu_seqlens, longest, p, s)
    chosen = [torch.randperm(n)[: (n + 2) // 3].sort().values for n in lengths]
    rows = torch.cat([c + b for c, b in zip(chosen, cu_seqlens[:-1], strict=True)])
    cu_rows = torch.tensor([0, *itertools.accumulate(map(len, chosen))], dtype=torch.int32)
    y = run(x, cu_seqlens, longest, p, s, rows=(rows, cu_rows))
    assert (y - whole[rows]).abs().max() < 1e-5 * whole.abs().max()
    none = torch.zeros(0, dtype=torch.int64), torch.zeros_like(cu_rows)
    assert run(x, cu_seqlens, longest, p, s, rows=none).shape == (0, x.shape[1])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_several_layers_are_one_after_the_other(lengths: list[int], threads: int) -> None:
    layers = [make(heads=n, kv_heads=n, head_dim=64 // n) for n in (4, 2, 1)]
    layers[1] = (to_int8(layers[1][0]), layers[1][1]._replace(window=(3, 3)))
    x, cu_seqlens, longest = inputs(lengths)
    parameters = [t for p, _ in layers for t in p.tensors()]
    rows = torch.arange(0, sum(lengths), 2)
    cu_rows = torch.searchsorted(rows, cu_seqlens, out_int32=True)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        call = (x, cu_seqlens, longest, parameters, [s for _, s in layers])
        whole, some = encoder_layers(*call), encoder_layers(*call, rows=(rows, cu_rows))
        want = x
        for p, s in layers[:-1]:
            want = run(want, cu_seqlens, longest, p, s)
        p, s = layers[-1]
        assert torch.equal(whole, run(want, cu_seqlens, longest, p, s))
        assert torch.equal(some, run(want, cu_seqlens, longest, p, s, rows=(rows, cu_rows)))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("int8", [False, True])
def test_neither_threads_nor_other_sequences_change_a_row(int8: bool) -> None:
    p, s = make(gated=True)
    p = to_int8(p) if int8 else p
    x, cu_seqlens, longest = inputs([300, 20, 250, 64])
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(run(x, cu_seqlens, longest, p, s))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(y, found[0]) for y in found)
    alone = run(x[300:320].clone(), torch.tensor([0, 20], dtype=torch.int32), 20, p, s)
    assert (alone - found[0][300:320]).abs().max() < 1e-5


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_sequence(value: float, int8: bool) -> None:
    p, s = make()
    p = to_int8(p) if int8 else p
    x, cu_seqlens, longest = inputs([20, 20])
    x[3, 5] = value
    y = run(x, cu_seqlens, longest, p, s)
    assert y[3].isnan().all()
    assert y[20:].isfinite().all()


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("int8", [False, True])
def test_two_operators_around_attention(lengths: list[int], int8: bool) -> None:
    p, s = make(heads=4, kv_heads=2, norms_first=True, gated=True)
    p = to_int8(p) if int8 else p
    x, cu_seqlens, longest = inputs(lengths)
    qkv = encoder_project(x, p.tensors(), s)
    attended = ops.varlen_attention(qkv, cu_seqlens, longest, num_heads=4)
    y = encoder_finish(x, attended, p.tensors(), s)
    whole = run(x, cu_seqlens, longest, p, s)
    # In 8 bits the whole layer's attention may be in bf16.
    assert (y - whole).norm() <= (0.02 if int8 else 1e-6) * whole.norm()


def compute() -> list[Tensor]:
    """The same inputs for all instruction sets."""
    torch.manual_seed(derived(0))
    found = []
    for form, lengths in itertools.product(("BERT's", "EuroBERT's", "other sizes"), LENGTHS):
        p, s = make(**FORMS[form])
        call = inputs(lengths, p.query.weight.shape[1])
        found += [run(*call, p, s), run(*call, to_int8(p), s)]
    return found


def test_every_instruction_set() -> None:
    *found, want = results_of_every_isa(compute).values()
    for index, tensors in enumerate(zip(want, *found, strict=True)):
        # In 8 bits a number may be rounded to another step where fp32 differs in a bit.
        bound = 2e-5 if index % 2 == 0 else 0.02
        for y in tensors[1:]:
            assert (y - tensors[0]).norm() <= bound * tensors[0].norm()


def test_dot_products_of_8_bits_are_exact() -> None:
    names = [isa for isa in ("avx2", "avx512") if isa in _C.built_isas().split(",")]
    if _C.cpu_isa() in ("generic", "avx2"):
        names = names[: names.index(_C.cpu_isa()) + 1] if _C.cpu_isa() in names else []
    for isa in names:  # with the instruction, where this CPU has it, and without
        plain, dots = run_with([{"BERT_UNPAD_ISA": isa + more} for more in ("", "+vnni")], compute)
        for a, b in zip(plain, dots, strict=True):
            assert torch.equal(a, b)


def test_fp32_weights_in_panels() -> None:
    weight = torch.randn(96, 64)
    panels = pack_weight(weight, torch.float32)
    assert panels.shape[1] == 64
    assert torch.equal(panels.transpose(1, 2).reshape(-1, 64)[:96], weight)


@pytest.mark.skipif(not _C.cpu_isa().endswith(("bf16", "amx")), reason="it multiplies no bf16")
def test_bf16_weights_in_panels() -> None:
    weight = torch.randn(96, 64)
    panels = pack_weight(weight, torch.bfloat16)
    assert panels.shape == (6, 32, 32)
    columns = panels.view(6, 32, 16, 2).permute(0, 2, 1, 3).reshape(96, 64)
    assert torch.equal(columns, weight.bfloat16())


def test_packed_weights() -> None:
    weight = torch.randn(96, 64)
    weight[5] = 0
    weight[7, 3] = 1000.0
    packed = pack_weight(weight, torch.int8)
    assert packed.shape == (128 * 72,)
    assert torch.equal(packed, pack_weight(weight, torch.int8))
    panels = packed[: 128 * 64].view(torch.int8).view(2, 16, 64, 4)
    whole = panels.permute(0, 2, 1, 3).reshape(128, 64)
    scales = packed[128 * 64 : 128 * 68].view(torch.float32)
    sums = packed[128 * 68 :].view(torch.int32)
    assert torch.equal(whole.sum(1, dtype=torch.int32), sums)
    assert not whole[96:].any()
    assert not whole[5].any()
    error = (whole[:96] * scales[:96, None] - weight).abs()
    assert (error <= weight.abs().amax(1, keepdim=True) * (0.5 / 127 + 2**-22)).all()
    for value in (torch.nan, -torch.inf):
        weight[1, 1] = value
        with pytest.raises(RuntimeError, match="weight must be finite, but row 1 is not"):
            pack_weight(weight, torch.int8)


def test_opcheck() -> None:
    p, _ = make()
    x, cu_seqlens, longest = inputs([5, 20])
    shape = [4, 4, 16, 96, 0, 0, 0, -1, -1]
    numbers = [0.25, 1e-5, 1e-5, 1e-5, 0.0, 1.0]
    arguments = (x, cu_seqlens, longest, None, None, None, p.tensors(), shape, numbers)
    torch.library.opcheck(torch.ops.bert_unpad.encoder_layers.default, arguments)
    rest = arguments[-3:]
    torch.library.opcheck(torch.ops.bert_unpad.encoder_project.default, (x, *rest))
    attended = torch.randn(25, 64)
    torch.library.opcheck(torch.ops.bert_unpad.encoder_finish.default, (x, attended, *rest))
    torch.library.opcheck(torch.ops.bert_unpad.encoder_pack.default, (p.query.weight, torch.int8))


def test_errors() -> None:
    p, s = make()
    x, cu_seqlens, longest = inputs([5, 20])

    def fails(text: str, *, kind=RuntimeError, parameters=p, shape=s, x=x, cu=cu_seqlens, **more):
        with pytest.raises(kind, match=text):
            encoder_layers(x, cu, longest, parameters.tensors(), [shape], **more)

    fails("x: expected a tensor", kind=TypeError, x=[1.0])
    fails("x must be float32", x=x.bfloat16())
    fails(r"x must have shape \[tokens, hidden\]", x=x[None])
    fails("cu_seqlens must end at the number of tokens", x=x[1:].contiguous())
    fails("cu_seqlens must be int32", cu=cu_seqlens.long())
    fails("a divisor", shape=s._replace(kv_heads=3))
    fails(r"parameters\[0\] must have shape", shape=s._replace(heads=8, kv_heads=8))
    fails("kind must be one of", kind=ValueError, shape=s._replace(activation="tanh"))
    fails("rotary embeddings need positions", shape=s._replace(rotary=(1e4, 1.0)))
    fails("a norm is missing", parameters=replace(p, norms=(None, p.norms[1], None)))
    fails(r"parameters\[14\] must have shape", parameters=replace(p, norms=(p.query,) * 3))
    for dtype in (torch.int8, torch.float32):
        half = replace(p, ffn_gate=Affine(pack_weight(p.ffn_in.weight, dtype), None))
        fails("both be packed in the same dtype, or neither", parameters=half)
    other = replace(p, query=Affine(pack_weight(p.ffn_in.weight, torch.int8), None))
    fails(r"parameters\[0\] must be what encoder_pack makes of", parameters=other)
    leaf = x.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="encoder_layers: gradients are not supported"):
        encoder_layers(leaf, cu_seqlens, longest, p.tensors(), [s]).sum().backward()
    odd, shape = make(hidden=48)
    fails("multiples of 32 features", parameters=odd, shape=shape, x=torch.randn(25, 48))
    with pytest.raises(RuntimeError, match=r"encoder_finish: attended must have shape"):
        encoder_finish(x, torch.randn(25, 3, 16), p.tensors(), s)
    rows, cu_rows = torch.tensor([3, 25]), torch.tensor([0, 1, 2], dtype=torch.int32)
    text = "rows of sequence 1 must be at least 5 and below 25, but entry 1 is "
    for wrong in (25, 4):
        fails(text + str(wrong), rows=(torch.tensor([3, wrong]), cu_rows))
    windowed = s._replace(window=(2, 2))
    fails("rows cannot go with", shape=windowed, rows=(rows - 1, cu_rows))
    fails("must hold as many sequences", rows=(rows - 1, cu_rows[:2]))
    two = (x, cu_seqlens, longest, p.tensors() + other.tensors())
    for call in (two, (*inputs([300, 500]), two[3])):  # one thread, and all of them
        with pytest.raises(RuntimeError, match=r"layer 1: parameters\[0\] must be what"):
            encoder_layers(*call, [s, s])
    with pytest.raises(RuntimeError, match="shape must hold 9 numbers a layer, got 9"):
        encoder_layers(*two, [s])
    with pytest.raises(RuntimeError, match="encoder_project: expected the parameters of one layer"):
        torch.ops.bert_unpad.encoder_project(x, two[3], [0] * 18, [0.0] * 12)
