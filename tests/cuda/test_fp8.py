"""Linear layers in 8 bits on a GPU: products, streams, graphs, errors. Roundings are in tests/ops,
for every backend."""

import pytest
import torch
from torch import Tensor

from bert_unpad import ops
from bert_unpad.ops.fp8 import quantize_fp8
from tests.support.cuda_checks import (
    DTYPES,
    GPU_ONLY,
    assert_graph_takes_new_values,
    assert_runs_on_the_current_stream,
    assert_same_bits,
)
from tests.support.seeds import derived

pytestmark = [
    *GPU_ONLY,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
        reason="needs a GPU of compute capability 8.9",
    ),
]


def draw(*shapes: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(derived(seed))
    return [torch.randn(shape, generator=generator).to(dtype).cuda() for shape in shapes]


def gradients(x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    y = ops.fp8_linear(*leaves)
    y.backward(dy)
    return [y.detach(), *(t.grad for t in leaves)]


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 37, 300])
def test_products_are_those_of_the_cpu(rows, dtype):
    """Of the same rounded matrices, so that only the sums differ, and those of forward passes, in
    the tensor core's shorter accumulator, by more: 14 bits of 256 summands."""
    x, dy = draw((rows, 256), (rows, 512), dtype=dtype)
    weight, bias = draw((512, 256), (512,), dtype=torch.float32, seed=1)
    got = gradients(x, weight, bias, dy)
    want = gradients(x.cpu(), weight.cpu(), bias.cpu(), dy.cpu())
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=2e-2, atol=2e-2 * 16)


def test_bert_large_sizes():
    """Beside the 16-bit layer: 8 bits keep three bits of a mantissa, so sums agree to a few %."""
    x, dy = draw((12_345, 1024), (12_345, 4096), dtype=torch.bfloat16)
    weight, bias = draw((4096, 1024), (4096,), dtype=torch.float32, seed=1)
    got = gradients(x, weight, bias, dy)
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    y = ops.linear(*leaves)
    y.backward(dy)
    for a, b in zip(got, [y.detach(), *(t.grad for t in leaves)], strict=True):
        assert (a.float() - b.float()).norm() <= 0.06 * b.float().norm()


def test_streams_graphs_and_repetition():
    x, dy = draw((200, 256), (200, 512), dtype=torch.bfloat16)
    weight, bias = draw((512, 256), (512,), dtype=torch.float32, seed=1)
    assert_same_bits(gradients(x, weight, bias, dy), gradients(x, weight, bias, dy))
    assert_runs_on_the_current_stream(lambda x: gradients(x, weight, bias, dy), x)
    with torch.no_grad():
        assert_graph_takes_new_values(
            lambda: [ops.fp8_linear(x, weight, bias)], lambda: x.add_(torch.randn_like(x))
        )


def test_bad_input():
    x, weight = draw((4, 64), (128, 64), dtype=torch.bfloat16)
    q, _, scale = quantize_fp8(x, True)
    op = torch.ops.bert_unpad
    with pytest.raises(RuntimeError, match="x must have a multiple of 16 columns"):
        quantize_fp8(x[:, :8].contiguous(), False)
    with pytest.raises(RuntimeError, match="one of a and b must be float8_e4m3fn"):
        op.fp8_product(quantize_fp8(weight, True)[0], q, scale, scale, None, torch.float32, False)
    with pytest.raises(RuntimeError, match="same number of columns"):
        op.fp8_product(quantize_fp8(weight.T.contiguous(), False)[0], q, scale, scale, None,
                       torch.float32, False)  # fmt: skip
    kept = [[tensor] for tensor in quantize_fp8(weight, False)]
    with pytest.raises(RuntimeError, match="weights must be float32"):
        op.quantize_weights_fp8_([weight], *kept)
    with pytest.raises(RuntimeError, match="q_transposed must have shape that of its weight"):
        op.quantize_weights_fp8_([weight.float()], kept[0], kept[0], kept[2])
    with pytest.raises(RuntimeError, match="expected lists of equal length"):
        op.quantize_weights_fp8_([weight.float()], *kept[:2], [])
