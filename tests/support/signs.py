"""Compression to signs in plain PyTorch."""

import torch
from torch import Tensor

__all__ = ["pack", "packed", "rms", "signs"]


def rms(whole: Tensor) -> Tensor:
    """The scale: float64 []."""
    return whole.double().square().mean().sqrt() if whole.numel() else whole.double().sum()


def packed(negative: Tensor) -> Tensor:
    """bool [n] as uint8 [ceil(n / 8)], the first in the lowest bit."""
    padded = torch.nn.functional.pad(negative.long(), (0, -len(negative) % 8)).view(-1, 8)
    return (padded << torch.arange(8, device=padded.device)).sum(1).to(torch.uint8)


def signs(bits: Tensor) -> Tensor:
    """uint8 [rows, bytes] as float32 [rows, 8 * bytes] of 1 and -1."""
    places = torch.arange(8, device=bits.device)
    return 1.0 - 2.0 * (bits.long()[..., None] >> places & 1).flatten(1).float()


def pack(value: Tensor | None, error: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The bits of value + error, and the error that is left."""
    whole = error if value is None else value.float() + error
    negative = torch.signbit(whole)
    return packed(negative), whole - torch.where(negative, -scale, scale)
