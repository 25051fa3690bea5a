"""GELU that writes 8 bits, forward and backward: near what PyTorch gives on a CPU."""

import pytest
import torch
from torch import Tensor

from bert_unpad.ops.delayed_scaling import DelayedScale
from bert_unpad.ops.gelu_fp8 import bias_gelu_fp8, bias_gelu_fp8_backward
from tests.support.backends import GPU, Backend
from tests.support.seeds import derived

SCALES = {False: 0.02, True: 1e-4}  # by whether it is a gradient


def run(
    x: Tensor, bias: Tensor | None, dy: Tensor | None, tanh: bool, transpose: bool = True,
    before: float = 0.0,
) -> list[Tensor]:  # fmt: skip
    """The largest value, q and its transposed copy, and of a gradient the bias's; `before`: the
    largest value so far."""
    scale = torch.tensor(SCALES[dy is not None], device=x.device)
    noted = DelayedScale(scale, torch.zeros(1024, device=x.device))
    noted.largest[0] = before
    if dy is None:
        results = bias_gelu_fp8(x, bias, tanh, noted, transpose)
    else:
        results = bias_gelu_fp8_backward(dy, x, bias, tanh, noted, transpose)
    return [noted.largest.max(), *results]


def assert_close(got: Tensor, want: Tensor, most: float) -> None:
    """Equal but where another last bit before rounding rounds to the next of the 8-bit numbers, or
    where GELU or its derivative is a small difference: of terms of a few units, times `most`."""
    a, b = got.float(), want.float()
    error = 8 * torch.finfo(torch.float32).eps * most / SCALES[got.dtype == torch.float8_e5m2]
    torch.testing.assert_close(a, b, rtol=torch.finfo(got.dtype).eps, atol=error)
    assert a.numel() == 0 or (a != b).float().mean() < 0.01


# No row; one; a tile and a bit; several tiles for a block.
@GPU
@pytest.mark.sanitizer
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape",
    [
        *[(0, 16), (1, 16), (66, 80), (200, 144)],
        pytest.param((3000, 1040), marks=pytest.mark.backends("cuda")),
    ],
)
def test_near_the_cpu(
    backend: Backend, shape: tuple[int, int], dtype: torch.dtype, tanh: bool, gradient: bool
) -> None:
    generator = torch.Generator().manual_seed(derived(1))
    x, dy = (torch.randn(shape, generator=generator).mul(2).to(dtype) for _ in range(2))
    given = [x, torch.randn(shape[1], generator=generator), dy if gradient else None]
    most = max(t.abs().max().item() for t in (*given, torch.ones(1)) if t is not None and len(t))
    want_largest, want, _, *want_dbias = backend.on_cpu(run, *given, tanh)
    without_bias = backend.on_cpu(run, x, None, given[2], tanh)[1]
    given = backend.put(given)
    results = []
    for _ in backend.schedules_and_sizes():
        largest, q, kept, *dbias = run(*given, tanh)
        torch.testing.assert_close(largest, want_largest, rtol=1e-5, atol=0)
        assert_close(q, want, most)
        assert torch.equal(kept[:, : shape[0]].float(), q.float().T)
        assert not kept[:, shape[0] :].float().any()
        for a, b in zip(dbias, want_dbias, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        results.append(torch.cat([q.float().flatten(), *dbias]))
    assert all(torch.equal(result, results[0]) for result in results)
    _, q, kept, *dbias = run(given[0], None, given[2], tanh, transpose=False)
    assert kept.numel() == 0
    assert not any(x.numel() for x in dbias)
    assert_close(q, without_bias, most)


def test_the_largest_value_is_kept(backend: Backend) -> None:
    x = backend.put(torch.randn(20, 32))
    assert run(x, None, None, False, before=50.0)[0] == 50
    assert run(x, None, None, False, before=1e-3)[0] > 1e-3


def test_values_that_are_too_large_or_not_finite(backend: Backend) -> None:
    x = torch.full((3, 16), 1e4)
    x[0, 3], x[1, 4] = torch.inf, torch.nan
    x = backend.put(x)
    largest, q, _ = run(x, None, None, False)
    assert largest == torch.inf
    odd = ~x.isfinite()
    assert q.float()[odd].isnan().all()
    assert (q.float()[~odd] == 448).all()
