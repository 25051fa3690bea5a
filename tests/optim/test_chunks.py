"""Updates chunk by chunk: the bits of an update of all parameters at once, and the order."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bert_unpad.ops.fp8 import QuantizedWeight, quantize_fp8
from bert_unpad.ops.rounded_weights import find_copy, rounded
from bert_unpad.optim import FusedAdam, FusedLAMB, FusedStableAdamW, Muon, OneBitAdam
from tests.support.seeds import derived

OPTIMIZERS = {
    "adam": FusedAdam,
    "lamb": FusedLAMB,  # which clips
    "lans": partial(FusedLAMB, nesterov=True),
    "stable_adamw": FusedStableAdamW,
}
SHAPES = [(48, 32), (16, 16), (32,), (96, 16), (16, 48), (7,), (32, 64)]
STACKED = 3  # holds three matrices
CHUNKS = [2, 0, 0, 1, 2, 3, 7]


def _make(
    name: str, dtype: torch.dtype, chunks: list[int] | None, **options: Any
) -> tuple[Any, list[nn.Parameter], list[int]]:
    """An optimizer, its parameters, and the chunks that its steps have reported."""
    generator = torch.Generator().manual_seed(derived(0))
    params = [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]
    matrices = [p for p in params if p.dim() > 1 and p is not params[STACKED]]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [params[STACKED]], "weight_decay": 0.1, "stacked": (32, 32, 32)},
        {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer, seen = OPTIMIZERS[name](groups, lr=0.1, **options), []
    if chunks is not None:
        named = dict(zip(params, chunks, strict=True))
        optimizer.update_in_chunks({p: x for p, x in named.items() if x}, seen.append)
    return optimizer, params, seen


def _set_gradients(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(derived(step))
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def _values(optimizer: Any, params: list[nn.Parameter]) -> list[Tensor]:
    states = [x for p in params for _, x in sorted(optimizer.state[p].items())]
    copies = [copy for p in params if (copy := find_copy(p, QuantizedWeight)) is not None]
    eighths = [x.flatten().view(torch.uint8) for copy in copies for x in copy.tensors]
    sixteenths = [rounded(p, torch.bfloat16) for p in params]
    return [*(p.detach() for p in params), *states, *eighths, *sixteenths]


@pytest.mark.parametrize("copies", [None, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_chunks_change_no_bit(name, dtype, copies):
    """With clipping, steps that are left out, and gradients of some parameters only."""
    if dtype != torch.float32 and copies is not None:
        pytest.skip("copies are of float32 weights")
    options = {"max_grad_norm": 3.0, "master_weights": dtype != torch.float32}
    both = [_make(name, dtype, chunks, **options) for chunks in (None, CHUNKS)]
    for optimizer, params, _ in both if copies is not None else ():
        optimizer.keep_rounded([p for p in params if p.dim() > 1], copies)
    for step in range(5):
        for optimizer, params, seen in both:
            seen.clear()
            _set_gradients(params, step)
            if step == 2:
                params[4].grad[1, 1] = torch.nan
            if step == 3:
                params[3].grad = None
            optimizer.found_inf = torch.tensor(float(step == 4))
            optimizer.grad_scale = torch.tensor(0.5) if step == 1 else None
            optimizer.step()
        (whole, ours, none), (cut, theirs, seen) = both
        for a, b in zip(_values(whole, ours), _values(cut, theirs), strict=True):
            assert torch.equal(a, b)
        assert (none, seen) == ([], [0, 2, 3, 7] if step == 3 else [0, 1, 2, 3, 7])
    assert whole.skipped_steps == cut.skipped_steps == 2


@pytest.mark.parametrize("in_8_bits", [False, True])
def test_a_chunk_is_complete_when_it_is_reported(in_8_bits):
    """With its copies, and before anything of the next one changes."""
    optimizer, params, _ = _make("adam", torch.float32, CHUNKS)
    weights = [p for p in params if p.dim() > 1]
    optimizer.keep_rounded(weights, torch.float8_e4m3fn if in_8_bits else torch.bfloat16)
    before = [p.detach().clone() for p in params]

    def check(chunk: int) -> None:
        for p, old, number in zip(params, before, CHUNKS, strict=True):
            assert torch.equal(p, old) == (number > chunk)
        for p in weights:
            if in_8_bits:
                got, want = find_copy(p, QuantizedWeight).tensors[0], quantize_fp8(p, False)[0]
            else:
                got, want = rounded(p, torch.bfloat16), p.detach().bfloat16()
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
        reported.append(chunk)

    reported: list[int] = []
    optimizer.update_in_chunks(dict(zip(params, CHUNKS, strict=True)), check)
    _set_gradients(params, 0)
    optimizer.step()
    assert reported == [0, 1, 2, 3, 7]


def test_a_norm_is_that_of_all_chunks():
    """Of which no chunk alone reaches the bound."""
    optimizer, params, _ = _make("adam", torch.float32, CHUNKS, max_grad_norm=1.0)
    for p in params:
        p.grad = torch.full_like(p, 0.9 / math.sqrt(p.numel()))
    before = [p.grad.clone() for p in params]
    optimizer.step()
    scale = 1 / (0.9 * math.sqrt(len(params)))
    for p, gradient in zip(params, before, strict=True):
        expected = gradient * scale * 0.1  # 1 - betas[0]
        torch.testing.assert_close(optimizer.state[p]["exp_avg"], expected)


def test_what_takes_no_chunks_is_refused():
    weight = nn.Parameter(torch.randn(4, 4))
    for optimizer in (Muon([{"params": [weight], "use_muon": True}]), OneBitAdam([weight])):
        with pytest.raises(NotImplementedError, match="updates all parameters at once"):
            optimizer.update_in_chunks({weight: 1}, print)
