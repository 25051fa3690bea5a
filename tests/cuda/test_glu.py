"""Gated linear units on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bert_unpad import ops
from tests.support import reference
from tests.support.cuda_checks import (
    DTYPES,
    GPU_ONLY,
    assert_graph_takes_new_values,
    assert_runs_on_the_current_stream,
)
from tests.support.op_checks import results_of

pytestmark = GPU_ONLY

KINDS = list(reference.GATES)


def draw(rows: int, width: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """x, bias; and the gradient of y."""
    x = (2 * torch.randn(rows, 2 * width, device="cuda")).to(dtype)
    bias = torch.randn(2 * width, device="cuda")
    return [x, bias], torch.randn(rows, width, device="cuda").to(dtype)


@pytest.mark.sanitizer
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 1), (5, 64), (300, 65), (1000, 1152), (70_000, 8), (0, 16), (5, 0)], ids=str
)
def test_matches_the_reference(shape: tuple[int, int], dtype: torch.dtype, kind: str) -> None:
    (x, bias), dout = draw(*shape, dtype)
    for given in (None, bias, bias.to(dtype)):
        inputs = [x, given]
        reference.assert_as_good_as_pytorch(
            lambda: results_of(lambda x, b: ops.glu(x, kind, b), inputs, dout),  # noqa: B023
            lambda precision: results_of(
                lambda x, b: reference.glu(x, kind, b),
                inputs,  # noqa: B023
                dout,
                precision,
            ),
            dtype,
            ["y", "dx", "dbias"][: 2 if given is None else 3],
        )


@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_the_cpu(kind: str) -> None:
    inputs, dout = draw(50, 200, torch.float32)
    run = lambda *t: results_of(lambda x, b: ops.glu(x, kind, b), t[:2], t[2])  # noqa: E731
    on_cpu = run(*(t.cpu() for t in (*inputs, dout)))
    for a, b in zip(run(*inputs, dout), on_cpu, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-5 * b.abs().max().item())


def test_runs_on_the_current_stream() -> None:
    (x, bias), _ = draw(64, 1024, torch.float32)
    assert_runs_on_the_current_stream(lambda late: [ops.glu(late, "silu", bias)], x)


def test_can_be_captured_in_a_graph() -> None:
    (x, bias), dout = draw(64, 1024, torch.bfloat16)
    op = torch.ops.bert_unpad
    assert_graph_takes_new_values(
        lambda: [op.glu(x, bias, 2), *op.glu_backward(dout, x, bias, 2)], x.neg_
    )


@pytest.mark.parametrize("kind", KINDS)
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
