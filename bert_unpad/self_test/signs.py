"""Cases of the self-test for compression to signs."""

from collections.abc import Iterator

import torch
from torch import Tensor

from bert_unpad import ops
from bert_unpad.self_test.compare import LIMITS, Compared, Inputs, case

_SIZE = 5003  # no multiple of 8


def _bits(inputs: Inputs, rows: int) -> Tensor:
    return inputs.integers(256, rows, -(-_SIZE // 8)).to(torch.uint8)


def _signs(bits: Tensor) -> Tensor:
    """-1 where a bit is 1, else 1: float64 [rows, 8 * bytes]."""
    places = torch.arange(8, device=bits.device)
    return 1 - 2 * (bits.long()[..., None] >> places & 1).flatten(1).double()


@case
def sign_scale(inputs: Inputs) -> Iterator[Compared]:
    value, error = inputs.normal(_SIZE), inputs.parameter(_SIZE)
    expected = (value.double() + error.double()).square().mean().sqrt()
    yield Compared("scale", ops.sign_scale(value, error), expected, LIMITS[torch.float32])


@case
def sign_pack_(inputs: Inputs) -> Iterator[Compared]:
    value, error = inputs.normal(_SIZE), inputs.parameter(_SIZE)
    whole, scale = value.double() + error.double(), ops.sign_scale(value, error)
    bits = torch.empty(-(-_SIZE // 8), dtype=torch.uint8, device=inputs.device)
    ops.sign_pack_(value, error, bits, scale)
    signs = _signs(bits[None])[0, :_SIZE]
    yield Compared("signs", signs, 1 - 2 * torch.signbit(whole).double(), 0.0)
    yield Compared("error", error, whole - scale.double() * signs, LIMITS[torch.float32])


@case
def sign_mean_(inputs: Inputs) -> Iterator[Compared]:
    bits, scales = _bits(inputs, 3), inputs.parameter(3).abs()
    expected = (_signs(bits) * scales.double()[:, None]).mean(0)[:_SIZE]
    out = inputs.parameter(_SIZE)
    before = out.double()
    ops.sign_mean_(bits, scales, out, add=True)
    yield Compared("sum", out, before + expected, LIMITS[torch.float32])
    ops.sign_mean_(bits, scales, out)
    yield Compared("mean", out, expected, LIMITS[torch.float32])


@case
def sign_unpack_(inputs: Inputs) -> Iterator[Compared]:
    bits, scales = _bits(inputs, 3), inputs.parameter(3).abs()
    out = torch.empty(2 * _SIZE + 7, device=inputs.device)
    ops.sign_unpack_(bits, scales, out)
    expected = (_signs(bits) * scales.double()[:, None]).flatten()[: out.numel()]
    yield Compared("values", out, expected, LIMITS[torch.float32])
