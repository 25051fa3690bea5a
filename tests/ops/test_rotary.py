"""Rotary position embeddings against the plain reference, and against transformers' functions."""

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from bert_unpad import ops
from bert_unpad.batch import VarlenBatch
from tests.support import reference
from tests.support.backends import Backend
from tests.support.op_checks import assert_compiles_to_the_same_bits, results_of
from tests.support.seeds import derived

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Tokens, heads, head_dim, rotary_dim. Several tokens in a block or task, and several in a thread;
# whole vectors and tails of every width, one pair a thread; more pairs than fit a warp; one head of
# several in a thread; what is left of a head.
SHAPES = [
    *[(37, 6, 64, None), (5, 9, 40, 32), (3, 2, 256, None), (9, 24, 16, None), (11, 3, 34, None)],
    *[(6, 5, 7, 6), (20, 2, 2, None), (1, 40, 128, None), (37, 5, 64, 32), (0, 3, 8, None)],
    *(
        pytest.param((70, 5, *dims), marks=pytest.mark.backends("cpu"))
        for dims in [(16, None), (40, 24), (256, None)]
    ),
    *(
        pytest.param(shape, marks=pytest.mark.backends("cuda"))
        for shape in [(3000, 36, 64, None), (700, 24, 128, None), (500, 60, 16, None)]
    ),
]


@pytest.mark.sanitizer
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_the_reference(
    backend: Backend,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int | None],
    interleaved: bool,
) -> None:
    *sizes, rotary_dim = shape
    torch.manual_seed(derived(sizes[2]))
    x, dout = backend.put(torch.randn(2, *sizes).to(dtype)).unbind()
    positions = backend.put(torch.randint(-40_000, 40_000, (sizes[0],)))
    settings = {
        "heads": max(sizes[1] * 2 // 3, 1),
        "rotary_dim": rotary_dim,
        "interleaved": interleaved,
        "theta": 160000.0,
        "position_scale": 0.7,
    }
    for at in (positions, positions.int()):
        run = lambda x, at=at: ops.rotary_(x * 1, at, **settings)  # noqa: E731
        reference.assert_as_good_as_pytorch(
            lambda run=run: results_of(run, [x], dout),
            lambda precision: results_of(
                lambda x: reference.rotary(x, positions, **settings), [x], dout, precision
            ),
            dtype,
            ["y", "dx"],
        )
        # A rounding, beside one of cosine and sine.
        want = reference.rotary(x.double(), positions, **settings)
        rtol = torch.finfo(dtype).eps / 2 + 1e-6
        torch.testing.assert_close(run(x).double(), want, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.37, 8.0])
def test_angles_are_right_at_long_positions(
    backend: Backend, scale: float, interleaved: bool
) -> None:
    """Where an angle in fp32 is wrong in the third digit."""
    torch.manual_seed(derived(0))
    x, positions = torch.randn(200, 2, 64), torch.randint(-1_000_000, 1_000_000, (200,))
    positions[:4] = torch.tensor([32767, 32768, -(2**40), 2**40 + 1])
    x, positions = backend.put((x, positions))
    settings = {"heads": 2, "theta": 160000.0, "interleaved": interleaved, "position_scale": scale}
    got = ops.rotary_(x.clone(), positions, **settings)
    want = reference.rotary(x.double(), positions, **settings)
    # From 2^40 on, float64 angles themselves are off by 1e-4.
    near = positions.abs() <= 1_000_000
    assert (got - want)[near].norm() < 1e-6 * want[near].norm()
    torch.testing.assert_close(got.double().norm(dim=-1), x.double().norm(dim=-1))


def test_scores_depend_on_distances_only(backend: Backend) -> None:
    """Also beyond the range of int32, where both positions have the same upper half or not."""
    torch.manual_seed(derived(1))
    q, k = backend.put(torch.randn(2, 1, 1, 64))
    offsets = torch.tensor([0, 5, 2**31 - 20, 2**31 - 5, 2**32 - 5, 2**40, -(2**40), -7])
    offsets = backend.put(offsets)
    turn = lambda x, at: ops.rotary_(x.repeat(len(at), 1, 1), at, heads=1)  # noqa: E731
    scores = (turn(q, offsets + 12) * turn(k, offsets)).sum(-1)
    torch.testing.assert_close(scores, scores[:1].expand_as(scores), rtol=1e-5, atol=1e-5)


def test_int32_and_int64_positions_give_the_same_bits(backend: Backend) -> None:
    x, positions = backend.put((torch.randn(50, 2, 32), torch.randint(-5000, 5000, (50,))))
    one = ops.rotary_(x.clone(), positions, heads=2)
    assert torch.equal(one, ops.rotary_(x.clone(), positions.int(), heads=2))


def test_positions_start_again_in_every_sequence() -> None:
    torch.manual_seed(derived(2))
    lengths = [3, 0, 7, 1]
    x = torch.randn(11, 4, 16)
    batch = VarlenBatch.from_lengths(lengths)
    got = ops.rotary_(x.clone(), batch, heads=4)
    alone = [ops.rotary_(s.clone(), torch.arange(len(s)), heads=4) for s in x.split(lengths)]
    assert torch.equal(got, torch.cat(alone))


def test_backward_is_the_inverse() -> None:
    torch.manual_seed(derived(3))
    x = torch.randn(20, 3, 32, requires_grad=True)
    turned = ops.rotary_(x * 1, torch.arange(20) * 31, heads=2)
    turned.backward(turned.detach())
    torch.testing.assert_close(x.grad, x.detach())


def test_is_in_place_and_touches_nothing_else(backend: Backend) -> None:
    torch.manual_seed(derived(4))
    x, positions = backend.put((torch.randn(9, 5, 24), torch.arange(9)))
    before, version = x.clone(), x._version
    y = ops.rotary_(x, positions, heads=2, rotary_dim=8)
    assert y is x
    assert x._version > version
    assert not torch.equal(x[1:, :2, :8], before[1:, :2, :8])
    assert torch.equal(x[:, 2:], before[:, 2:])
    assert torch.equal(x[:, :2, 8:], before[:, :2, 8:])


@pytest.mark.sanitizer
@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_and_unaligned_views(
    backend: Backend, dtype: torch.dtype, interleaved: bool, offset: int
) -> None:
    """In place, and into a new tensor: nothing but the rotated heads is written."""
    torch.manual_seed(derived(5))
    positions = backend.put(torch.arange(6) * 5)
    settings = (3, 1e4, 16, interleaved, 1.0, False)
    views = [
        lambda qkv: qkv[:, 1],  # the keys
        lambda qkv: qkv.view(6, 12, 16)[:, 2:9],
        lambda qkv: qkv.view(12, 6, 16).transpose(0, 1),
    ]
    for view in views:
        store = backend.put(torch.randn(6 * 3 * 4 * 16 + 3).to(dtype))
        x = view(store[offset : len(store) - 3 + offset].view(6, 3, 4, 16))
        want = ops.rotary_(x.clone(), positions, heads=3, interleaved=interleaved)
        exact = reference.rotary(x.double(), positions, heads=3, interleaved=interleaved)
        torch.testing.assert_close(want, exact.to(dtype))
        before = store.clone()
        copy = torch.ops.bert_unpad.rotary(x, positions, *settings)
        assert copy.is_contiguous()
        assert torch.equal(copy, want)
        assert torch.equal(store, before)
        assert torch.equal(ops.rotary_(x, positions, heads=3, interleaved=interleaved), want)
        assert (store != before).sum() <= 6 * 3 * 16


def parts_of_qkv(x: Tensor) -> list[Tensor]:
    """Every way in which autograd may see what is rotated: itself, a view, part of a tensor."""
    batch = VarlenBatch.from_lengths([2, 5], x.device)
    whole = ops.rotary_(x * 1, batch, heads=2)
    view = ops.rotary_((x * 1).view(7, 48).view(7, 3, 16), batch, heads=2)
    qkv = x * 1
    ops.rotary_(qkv[:, :2], batch, heads=2)
    left = (x * 1).view(7, 48)
    ops.rotary_(left.view(7, 3, 16), batch, heads=2)  # the result is not used
    return [whole, view, qkv, left.view(7, 3, 16)]


@pytest.mark.backends("cpu", "block", "cuda")
def test_gradients_through_views(backend: Backend) -> None:
    torch.manual_seed(derived(6))
    x, weight = backend.put(torch.randn(2, 7, 3, 16)).unbind()
    x = x.clone().requires_grad_()
    results = parts_of_qkv(x)
    gradients = [torch.autograd.grad((y * weight).sum(), x)[0] for y in results]
    for y, gradient in zip(results, gradients, strict=True):
        assert torch.equal(y, results[0])
        assert torch.equal(gradient, gradients[0])


@pytest.mark.parametrize("strided", ["last", "all"])
def test_gradient_of_any_stride(strided: str) -> None:
    torch.manual_seed(derived(7))
    x = torch.randn(7, 3, 16, requires_grad=True)
    run = lambda: ops.rotary_(x * 1, torch.arange(7), heads=2)  # noqa: E731
    dout = torch.ones(7, 3, 16)
    want = torch.autograd.grad(run(), x, dout)[0]
    dout = torch.ones(7, 3, 32)[..., ::2] if strided == "last" else torch.ones(()).expand(7, 3, 16)
    assert torch.equal(torch.autograd.grad(run(), x, dout)[0], want)


def test_a_gradient_that_others_hold_is_not_changed() -> None:
    held = []
    x = torch.randn(5, 1, 8, requires_grad=True)
    y = ops.rotary_(x * 1, torch.arange(5), heads=1)
    y.register_hook(held.append)
    (y * torch.ones(5, 1, 8)).sum().backward()
    assert torch.equal(held[0], torch.ones(5, 1, 8))


def test_a_tensor_that_a_backward_pass_needs_is_protected() -> None:
    x = torch.randn(5, 1, 8, requires_grad=True)
    saved = x * 1
    loss = saved.square().sum()
    ops.rotary_(saved, torch.arange(5), heads=1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    before = x.detach().clone()
    for leaf in (x, x.view(5, 1, 8), x[1:]):
        with pytest.raises(RuntimeError, match="rotary_: x must not be a leaf that requires grad"):
            ops.rotary_(leaf, torch.arange(len(leaf)), heads=1)
    assert torch.equal(x, before)
    with torch.no_grad():
        assert ops.rotary_(x, torch.arange(5), heads=1) is x
    assert x.is_leaf
    assert not torch.equal(x, before)


@pytest.mark.parametrize("shape", [(0, 3, 8), (4, 0, 8), (4, 3, 8)])
def test_nothing_to_do(backend: Backend, shape: tuple[int, ...]) -> None:
    x = backend.put(torch.randn(shape)).requires_grad_()
    positions = backend.put(torch.zeros(shape[0], dtype=torch.int32))
    y = ops.rotary_(x * 1, positions, heads=0)
    y.sum().backward()
    assert torch.equal(y, x)
    assert torch.equal(x.grad, torch.ones_like(x))


def test_nan_stays_in_its_pair(backend: Backend) -> None:
    x, positions = backend.put((torch.ones(2, 2, 8), torch.tensor([0, 3])))
    x[1, 0, 1] = float("nan")
    y = ops.rotary_(x, positions, heads=2)
    assert y.isnan().nonzero().tolist() == [[1, 0, 1], [1, 0, 5]]


def test_same_bits_every_time(backend: Backend) -> None:
    torch.manual_seed(derived(8))
    x, dout = backend.put(torch.randn(2, 200, 6, 32))
    batch = VarlenBatch.from_lengths([80, 120], backend.device)
    backend.assert_same_bits(
        lambda: results_of(lambda x: ops.rotary_(x * 1, batch, heads=4), [x], dout)
    )


@pytest.mark.backends("cuda")
def test_agrees_with_the_cpu(backend: Backend) -> None:
    x, positions = torch.randn(300, 6, 64), torch.randint(-100_000, 100_000, (300,))
    got = ops.rotary_(*backend.put((x.clone(), positions)), heads=4).cpu()
    torch.testing.assert_close(got, ops.rotary_(x, positions, heads=4))


@pytest.mark.backends("cpu", "cuda")
@pytest.mark.parametrize("interleaved", [False, True])
def test_opcheck(backend: Backend, interleaved: bool) -> None:
    x, positions = backend.put((torch.randn(6, 3, 16), torch.arange(6)))
    arguments = (positions, 2, 1e4, 12, interleaved, 0.5)
    opcheck(torch.ops.bert_unpad.rotary_, (x, *arguments, False))
    opcheck(torch.ops.bert_unpad.rotary, (x.requires_grad_(), *arguments, True))


def test_compiles_without_graph_breaks() -> None:
    torch.manual_seed(derived(9))
    batch = VarlenBatch.from_lengths([2, 5])
    x, weight = torch.randn(7, 8, requires_grad=True), torch.randn(8, 48, requires_grad=True)

    def f(x: Tensor, weight: Tensor) -> Tensor:
        qkv = (x @ weight).view(7, 3, 16)
        ops.rotary_(qkv, batch, heads=2)
        return qkv.square().cumsum(1).sum()

    assert_compiles_to_the_same_bits(f, [x, weight])


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_operator_of_compiled_code_is_the_same(backend: Backend, interleaved: bool) -> None:
    torch.manual_seed(derived(10))
    x, positions = backend.put((torch.randn(3, 12, 16).transpose(0, 1), torch.arange(12)))
    for heads, rotary_dim in ((3, 16), (2, 16), (2, 6), (0, 2)):
        arguments = (positions, heads, 1e4, rotary_dim, interleaved, 1.0)
        for inverse in (False, True):
            y = x.clone()
            torch.ops.bert_unpad.rotary_(y, *arguments, inverse)
            copy = torch.ops.bert_unpad.rotary(x, *arguments, inverse)
            assert copy.is_contiguous()
            assert torch.equal(copy, y)


def padded() -> tuple[Tensor, Tensor]:
    """q [2, 3, 40, 16], as transformers takes it, and its positions [2, 40]."""
    torch.manual_seed(derived(11))
    return torch.randn(2, 3, 40, 16), torch.stack([torch.arange(40), torch.arange(40) * 3])


def assert_equals(want: Tensor, q: Tensor, positions: Tensor, **settings) -> None:
    packed = q.transpose(1, 2).flatten(0, 1).contiguous()
    got = ops.rotary_(packed, positions.flatten(), heads=3, **settings)
    # Their angles are rounded to fp32, at most 120 radians to 4e-6.
    torch.testing.assert_close(got.view(2, 40, 3, 16).transpose(1, 2), want, rtol=0, atol=4e-5)


@pytest.mark.parametrize("name", ["Llama", "EuroBert", "Esm"])
def test_equals_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    module = pytest.importorskip(f"transformers.models.{name.lower()}.modeling_{name.lower()}")
    q, positions = padded()
    sizes = {"hidden_size": 48, "num_attention_heads": 3}
    embedding = getattr(module, f"{name}RotaryEmbedding", None)
    if not hasattr(embedding, "compute_default_rope_parameters"):
        pytest.skip("an earlier transformers, with other functions")
    embedding = embedding(getattr(transformers, f"{name}Config")(**sizes))
    want, _ = module.apply_rotary_pos_emb(q, q, *embedding(q, positions))
    parameters = getattr(embedding.config, "rope_parameters", {"rope_theta": 10000.0})
    assert_equals(want, q, positions, theta=parameters["rope_theta"])


@pytest.mark.parametrize(("kind", "theta"), [("full", 160000.0), ("sliding", 10000.0)])
def test_equals_modernbert(kind: str, theta: float) -> None:
    transformers = pytest.importorskip("transformers")
    module = pytest.importorskip("transformers.models.modernbert.modeling_modernbert")
    config = transformers.ModernBertConfig(hidden_size=48, num_attention_heads=3)
    if not hasattr(config, "rope_parameters"):
        pytest.skip("an earlier transformers, with other functions")
    q, positions = padded()
    angles = module.ModernBertRotaryEmbedding(config)(q, positions, f"{kind}_attention")
    assert_equals(module.apply_rotary_pos_emb(q, q, *angles)[0], q, positions, theta=theta)


def test_equals_gptj() -> None:
    module = pytest.importorskip("transformers.models.gptj.modeling_gptj")
    q, positions = padded()
    sine, cosine = module.create_sinusoidal_positions(120, 16)[positions].chunk(2, -1)
    want = module.apply_rotary_pos_emb(q.transpose(1, 2), sine, cosine).transpose(1, 2)
    assert_equals(want, q, positions, interleaved=True)


@pytest.mark.backends("cpu", "cuda")
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.randn(6, 20)}, ValueError, r"x must have shape \[tokens, heads, head_dim\]"),
        ({"x": torch.randn(6, 4, 8).double()}, RuntimeError, "x must be float32, bfloat16 or fl"),
        ({"x": torch.randn(6, 4, 16)[..., ::2]}, RuntimeError, "x must be contiguous in its last"),
        ({"x": torch.randn(1, 4, 8).expand(6, 4, 8)}, RuntimeError, "no two elements at one addr"),
        ({"x": torch.randn(6, 1, 8).expand(6, 4, 8)}, RuntimeError, "no two elements at one addr"),
        (
            {"x": torch.randn(100).as_strided((6, 4, 8), (8, 4, 1))},
            RuntimeError,
            "no two elements at one address, got strides 8, 4, 1",
        ),
        ({"positions": torch.arange(5)}, RuntimeError, r"positions must have shape \[tokens\]"),
        ({"positions": torch.arange(6.0)}, RuntimeError, "positions must be int32 or int64"),
        ({"positions": torch.arange(12)[::2]}, RuntimeError, "positions must be contiguous"),
        ({"heads": 5}, RuntimeError, "heads must be between 0 and 4, .*, got 5"),
        ({"heads": -1}, RuntimeError, "heads must be between 0 and 4, .*, got -1"),
        ({"rotary_dim": 3}, RuntimeError, "rotary_dim must be even and between 2 and 8, got 3"),
        ({"rotary_dim": 10}, RuntimeError, "rotary_dim must be even and between 2 and 8, got 10"),
        ({"rotary_dim": 0}, RuntimeError, "rotary_dim must be even and between 2 and 8, got 0"),
        ({"theta": 0.0}, RuntimeError, "theta must be finite and above 0, got 0"),
        ({"theta": float("inf")}, RuntimeError, "theta must be finite and above 0, got inf"),
        ({"position_scale": -1.0}, RuntimeError, "position_scale must be finite and above 0"),
    ],
)
def test_bad_input_is_named(
    backend: Backend, change: dict, error: type[Exception], message: str
) -> None:
    good = {"x": torch.randn(6, 4, 8), "positions": torch.arange(6), "heads": 2}
    given = {name: on(backend, value) for name, value in (good | change).items()}
    with pytest.raises(error, match=message):
        ops.rotary_(**given)


def on(backend: Backend, value):
    """With the strides that it has."""
    if not isinstance(value, Tensor):
        return value
    storage = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
    return backend.put(storage).as_strided(value.shape, value.stride(), value.storage_offset())


@pytest.mark.backends("cuda")
def test_another_device_is_named(backend: Backend) -> None:
    with pytest.raises(RuntimeError, match="rotary_: positions must be on the same device"):
        ops.rotary_(backend.put(torch.randn(6, 3, 8)), torch.arange(6), heads=2)


def test_widths_that_cannot_be_halved() -> None:
    with pytest.raises(RuntimeError, match="rotary_dim must be even and between 2 and 1, got 1"):
        ops.rotary_(torch.randn(3, 2, 1), torch.arange(3), heads=1)
    with pytest.raises(RuntimeError, match="between 2 and 256, got 300"):
        ops.rotary_(torch.randn(3, 2, 300), torch.arange(3), heads=1)


def test_views_that_autograd_refuses_stay_as_they_are():
    qkv = torch.randn(4, 3, 2, 8, requires_grad=True) * 1.0
    before = qkv.detach().clone()
    for view in (qkv.unbind(1)[0], qkv.view(4, 6, 8).split(2, 1)[1]):
        with pytest.raises(RuntimeError, match="rotary_: x must not be a view that cannot be cha"):
            ops.rotary_(view, torch.arange(4, dtype=torch.int32), heads=2)
        assert torch.equal(qkv, before)
