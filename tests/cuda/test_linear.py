"""Linear layers and the feed-forward half by cuBLASLt on a GPU: large sizes, streams, graphs, and
which algorithms it takes. Values are in tests/ops, for every backend."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bert_unpad import ops
from tests.support import cuda_checks
from tests.support.cuda_checks import (
    GPU_ONLY,
    assert_graph_takes_new_values,
    assert_runs_on_the_current_stream,
    assert_same_bits,
)
from tests.support.seeds import derived

pytestmark = GPU_ONLY


def draw(*shapes: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(derived(seed))
    return [torch.randn(s, generator=generator, device="cuda").to(dtype) for s in shapes]


def run(function: Callable, inputs: list[Tensor], douts: list[Tensor]) -> list[Tensor]:
    """The function's results, and the gradients of its inputs."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    outputs = function(*leaves)
    torch.autograd.backward(outputs, [d.to(o.dtype) for d, o in zip(douts, outputs, strict=True)])
    return [*(o.detach() for o in outputs), *(t.grad for t in leaves)]


def check(ours: Callable, plain: Callable, inputs: list[Tensor], douts: list[Tensor]) -> None:
    """At most twice the error of plain PyTorch in x's dtype."""
    dtype = inputs[0].dtype
    want = run(plain, [t.double() for t in inputs], douts)
    baseline = run(lambda *given: plain(*(t.to(dtype) for t in given)), inputs, douts)
    for number, (a, b, w) in enumerate(zip(run(ours, inputs, douts), baseline, want, strict=True)):
        if w.numel() == 0:
            assert a.shape == w.shape
            continue
        scale = w.abs().max().clamp(min=1e-30)
        error, peer = ((t.double() - w).abs().max() / scale for t in (a, b))
        assert error <= max(2 * peer, torch.finfo(dtype).eps), (number, float(error), float(peer))


def plain_mlp(form: str) -> Callable:
    return lambda x, w1, b1, w2: (
        F.linear(F.gelu(F.linear(x, w1, b1), approximate=form), w2),
        x * 1,
    )


def mlp_inputs(rows: int, dtype: torch.dtype, low: torch.dtype, sizes: tuple[int, int]):
    hidden, inner = sizes
    (x,) = draw((rows, hidden), dtype=dtype)
    weights = draw((inner, hidden), (inner,), (hidden, inner), dtype=low, seed=1)
    weights = [weights[0] / hidden**0.5, weights[1], weights[2] / inner**0.5]
    return [x, *weights], draw((rows, hidden), (rows, hidden), dtype=dtype, seed=2)


@pytest.mark.parametrize("form", ["none", "tanh"])
def test_bert_large_sizes(form):
    inputs, douts = mlp_inputs(12_345, torch.bfloat16, torch.float32, (1024, 4096))
    check(lambda *t: ops.mlp(*t, approximate=form), plain_mlp(form), inputs, douts)


def test_addresses_of_lower_alignment():
    """A view into a buffer, as the split QKV weight or DDP's buckets are."""
    buffer = draw((16 + 37 * 128,), dtype=torch.bfloat16)[0]
    weight, bias = draw((256, 128), (256,), dtype=torch.bfloat16, seed=1)
    want = None
    for offset in (0, 8):
        x = buffer[offset : offset + 37 * 128].view(37, 128)
        x.copy_(draw((37, 128), dtype=torch.bfloat16, seed=3)[0])
        y = ops.linear(x, weight, bias)
        want = y if want is None else want
        torch.testing.assert_close(y, want)


def test_same_bits_every_time():
    inputs, douts = mlp_inputs(1000, torch.bfloat16, torch.float32, (1024, 4096))
    first = run(ops.mlp, inputs, douts)
    for _ in range(3):
        assert_same_bits(run(ops.mlp, inputs, douts), first)


def test_runs_on_the_current_stream():
    (inputs, douts) = mlp_inputs(64, torch.bfloat16, torch.float32, (128, 512))
    assert_runs_on_the_current_stream(lambda x: run(ops.mlp, [x, *inputs[1:]], douts), inputs[0])


def test_graphs_take_new_values():
    (x,) = draw((64, 128), dtype=torch.bfloat16)
    weight, bias = draw((256, 128), (256,), dtype=torch.bfloat16, seed=1)
    assert_graph_takes_new_values(lambda: [ops.linear(x, weight, bias)], lambda: x.mul_(2))


def test_timed_algorithms_are_kept(tmp_path):
    path = tmp_path / "algorithms.txt"
    x, weight = draw((100, 256), (512, 256), dtype=torch.bfloat16)
    want = ops.linear(x, weight)
    try:
        ops.time_algorithms(path=path)
        y = ops.linear(x, weight)
        torch.testing.assert_close(y, want)
        assert len(path.read_text().splitlines()) == 1
        ops.time_algorithms(path=path)  # another run
        assert torch.equal(ops.linear(x, weight), y)
        ops.time_algorithms(False)
        torch.testing.assert_close(ops.linear(x, weight), want)
        assert len(path.read_text().splitlines()) == 1
    finally:
        ops.time_algorithms()


def test_a_captured_product_is_not_timed_and_keeps_its_algorithm():
    ops.time_algorithms()
    (x,) = draw((64, 192), dtype=torch.bfloat16)
    (weight,) = draw((320, 192), dtype=torch.bfloat16, seed=1)
    ops.linear(x, weight[:64].contiguous())  # the library and its handle
    captured, replay = cuda_checks.capture(lambda: [ops.linear(x, weight)])
    replay()
    assert_same_bits(captured, [ops.linear(x, weight)])


def test_bad_input():
    x, weight = draw((4, 64), (128, 64), dtype=torch.bfloat16)
    op = torch.ops.bert_unpad
    with pytest.raises(RuntimeError, match=r"linear: x must be bfloat16 or float16 on a GPU"):
        op.linear(x.float(), weight.float(), None, False)
    with pytest.raises(RuntimeError, match=r"linear: x must have a multiple of 8 columns"):
        op.linear(x[:, :4].contiguous(), weight[:, :4].contiguous(), None, False)
    with pytest.raises(RuntimeError, match=r"linear: weight must have 64 columns like x"):
        op.linear(x, weight.t().contiguous(), None, False)
    with pytest.raises(RuntimeError, match=r"linear_dgrad: addend and pre exclude each other"):
        op.linear_dgrad(op.linear(x, weight, None, False)[0], weight, x, x)
    with pytest.raises(RuntimeError, match=r"linear_wgrad: x must have 4 rows like dy"):
        op.linear_wgrad(x, x[:3], False, torch.float32)
