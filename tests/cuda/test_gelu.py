"""Bias + GELU and gated linear units: streams, graphs, devices, sizes, cuBLASLt's products."""

import pytest
import torch
from torch import Tensor

from bert_unpad import ops
from tests.support import reference
from tests.support.cuda_checks import (
    GPU_ONLY,
    NEEDS_TWO_GPUS,
    assert_graph_takes_new_values,
    assert_runs_on_the_current_stream,
)
from tests.support.op_checks import results_of

pytestmark = GPU_ONLY


def draw(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [64, 1024] and bias."""
    return torch.randn(64, 1024, device="cuda").to(dtype), torch.randn(1024, device="cuda")


@pytest.mark.parametrize(
    "run", [ops.bias_gelu, lambda x, bias: ops.glu(x, "silu", bias)], ids=["bias_gelu", "glu"]
)
class TestCalls:
    def test_runs_on_the_current_stream(self, run) -> None:
        x, bias = draw(torch.float32)
        assert_runs_on_the_current_stream(lambda late: [run(late, bias)], x)

    def test_can_be_captured_in_a_graph(self, run) -> None:
        x, bias = (t.requires_grad_() for t in draw(torch.bfloat16))

        def both() -> list[Tensor]:
            y = run(x, bias)
            return [y.detach(), *torch.autograd.grad(y, (x, bias), torch.ones_like(y))]

        assert_graph_takes_new_values(both, x.detach().neg_)

    @NEEDS_TWO_GPUS
    def test_runs_on_the_device_of_its_tensors(self, run) -> None:
        x, bias = draw(torch.float32)
        y = run(x.to("cuda:1"), bias.to("cuda:1"))
        assert torch.equal(y.cpu(), run(x, bias).cpu())


@pytest.mark.large(12)
def test_more_than_2_to_the_31_elements() -> None:
    rows, columns = 2**19 + 3, 4096
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    x[-3:] = torch.randn(3, columns, device="cuda")
    y = ops.bias_gelu(x)
    assert torch.equal(y[-3:], ops.bias_gelu(x[-3:].clone()))
    assert not y[:-3].any()


@pytest.mark.parametrize("kind", list(reference.GATES))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_glu_mlp(dtype: torch.dtype, kind: str) -> None:
    """By cuBLASLt's products."""
    x = torch.randn(300, 128, device="cuda").to(dtype)
    weight1, weight2 = (
        torch.randn(shape, device="cuda") / 11 for shape in ((512, 128), (128, 256))
    )

    def plain(x: Tensor, weight1: Tensor, weight2: Tensor) -> Tensor:
        return reference.glu(x @ weight1.to(x.dtype).t(), kind) @ weight2.to(x.dtype).t()

    inputs, dout = [x, weight1, weight2], torch.randn(300, 128, device="cuda").to(dtype)
    reference.assert_as_good_as_pytorch(
        lambda: results_of(lambda x, a, b: ops.glu_mlp(x, a, None, b, kind=kind)[0], inputs, dout),
        lambda precision: results_of(plain, inputs, dout, precision),
        dtype,
        ["y", "dx", "dweight1", "dweight2"],
    )
