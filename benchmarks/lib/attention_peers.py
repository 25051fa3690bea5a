"""Who competes in the attention benchmark: our two schedules and what PyTorch has.

A contender makes its inputs beforehand; `forward` returns what `backward` needs, `backward` returns
dq, dk, dv. All are called below autograd where PyTorch allows it. Padded contenders get tensors
that are padded already and no mask (the flash backend takes none), so padding costs them its
arithmetic and nothing else: what they compute there is of no use to a model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.lib.attention_cases import AttentionCase
from bert_unpad.batch import VarlenBatch, pad, unpad


class NotSupportedError(Exception):
    """Why a contender cannot take a case."""


@dataclass
class Inputs:
    """One case's tensors, bf16."""

    case: AttentionCase
    batch: VarlenBatch
    qkv: Tensor  # [T, 3, heads, head_dim]
    dout: Tensor  # [T, heads, head_dim]

    @classmethod
    def random(cls, case: AttentionCase, device: str) -> Inputs:
        batch = VarlenBatch.from_lengths(case.lengths, device)
        shape = (batch.total, 3, case.heads, case.head_dim)
        qkv = torch.randn(shape, device=device, dtype=torch.bfloat16)
        return cls(case, batch, qkv, torch.randn_like(qkv[:, 0]))

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.case.head_dim)


class Contender:
    def __init__(self, inputs: Inputs, p: float) -> None:
        self.inputs, self.p = inputs, p
        self.lengths = (inputs.batch.cu_seqlens,) * 2 + (inputs.batch.max_seqlen,) * 2

    def forward(self) -> Any:
        raise NotImplementedError

    def backward(self, saved: Any) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError

    def packed(self, x: Tensor) -> Tensor:
        """A result or gradient as [T, heads, head_dim]."""
        return x


class Ours(Contender):
    def __init__(self, inputs: Inputs, p: float, schedule: str) -> None:
        super().__init__(inputs, p)
        batch = inputs.batch
        rng = torch.tensor([1, 2], device=inputs.qkv.device) if p else None
        groups = batch.group_sizes if schedule == "groups" else None
        self.tail = (
            batch.cu_seqlens, batch.max_seqlen, inputs.scale, p, rng,
            batch.order_table.view(-1, 4), groups,
        )  # fmt: skip

    def forward(self) -> tuple[Tensor, Tensor]:
        return torch.ops.bert_unpad.varlen_attention(self.inputs.qkv, *self.tail)

    def backward(self, saved: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        dqkv, *_ = torch.ops.bert_unpad.varlen_attention_backward(
            self.inputs.dout, self.inputs.qkv, *saved, *self.tail
        )
        return dqkv.unbind(1)


class WithoutWgmma(Ours):
    """Ours on a Hopper GPU, by the kernels that other GPUs have."""

    def __init__(self, inputs: Inputs, p: float) -> None:
        super().__init__(inputs, p, "list")
        if inputs.qkv.is_cuda and torch.cuda.get_device_capability() != (9, 0):
            raise NotSupportedError("this GPU has no wgmma")

    def forward(self) -> tuple[Tensor, Tensor]:
        with _without_wgmma():
            return super().forward()

    def backward(self, saved: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        with _without_wgmma():
            return super().backward(saved)


@contextmanager
def _without_wgmma() -> Iterator[None]:
    os.environ["BERT_UNPAD_WGMMA"] = "0"
    try:
        yield
    finally:
        del os.environ["BERT_UNPAD_WGMMA"]


class Flash(Contender):
    """FlashAttention-2 as PyTorch has it, on packed tokens, with dropout."""

    def forward(self) -> tuple[Tensor, ...]:
        return torch.ops.aten._flash_attention_forward(
            *self.inputs.qkv.unbind(1), *self.lengths, self.p, False, False, scale=self.inputs.scale
        )

    def backward(self, saved: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        out, lse, rng_state, unused, _ = saved
        return torch.ops.aten._flash_attention_backward(
            self.inputs.dout, *self.inputs.qkv.unbind(1), out, lse, *self.lengths, self.p, False,
            rng_state, unused, scale=self.inputs.scale,
        )  # fmt: skip


class Cudnn(Contender):
    """cuDNN's attention on packed tokens, with dropout."""

    def forward(self) -> tuple[Any, ...]:
        return torch.ops.aten._cudnn_attention_forward(
            *self.inputs.qkv.unbind(1), None, *self.lengths, True, self.p, False, False,
            scale=self.inputs.scale,
        )  # fmt: skip

    def backward(self, saved: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor]:
        out, lse, *_, seed, offset, _ = saved
        return torch.ops.aten._cudnn_attention_backward(
            self.inputs.dout, *self.inputs.qkv.unbind(1), out, lse, seed, offset, None,
            *self.lengths, self.p, False, scale=self.inputs.scale,
        )  # fmt: skip


class Autograd(Contender):
    """For functions that PyTorch offers through autograd only."""

    inputs_of_grad: tuple[Tensor, ...]
    dout: Tensor

    def backward(self, saved: tuple[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        return torch.autograd.grad(saved[0], self.inputs_of_grad, self.dout, retain_graph=True)


class VarlenAttn(Autograd):
    """torch.nn.attention.varlen, PyTorch's documented function for packed tokens."""

    def __init__(self, inputs: Inputs, p: float) -> None:
        super().__init__(inputs, p)
        if p:
            raise NotSupportedError("it has no dropout")
        self.inputs_of_grad = tuple(x.requires_grad_() for x in inputs.qkv.detach().unbind(1))
        self.dout = inputs.dout

    def forward(self) -> tuple[Tensor]:
        from torch.nn.attention.varlen import varlen_attn

        scale = self.inputs.scale
        return (varlen_attn(*self.inputs_of_grad, *self.lengths, scale=scale),)


class Padded(Autograd):
    """scaled_dot_product_attention on [B, heads, S, head_dim], with one backend."""

    def __init__(self, inputs: Inputs, p: float, backend: SDPBackend) -> None:
        super().__init__(inputs, p)
        self.backend = backend
        padded = pad(inputs.qkv, inputs.batch).permute(2, 0, 3, 1, 4)
        self.inputs_of_grad = tuple(x.requires_grad_() for x in padded.detach().unbind(0))
        self.dout = pad(inputs.dout, inputs.batch).transpose(1, 2)

    def forward(self) -> tuple[Tensor]:
        with sdpa_kernel(self.backend):
            return (scaled_dot_product_attention(*self.inputs_of_grad, dropout_p=self.p),)

    def packed(self, x: Tensor) -> Tensor:
        return unpad(x.transpose(1, 2), self.inputs.batch)


CONTENDERS: dict[str, Callable[[Inputs, float], Contender]] = {
    "list": lambda inputs, p: Ours(inputs, p, "list"),
    "groups": lambda inputs, p: Ours(inputs, p, "groups"),
    "list, no wgmma": WithoutWgmma,
    "flash, packed": Flash,
    "cudnn, packed": Cudnn,
    "varlen_attn": VarlenAttn,
    "flash, padded": lambda inputs, p: Padded(inputs, p, SDPBackend.FLASH_ATTENTION),
    "cudnn, padded": lambda inputs, p: Padded(inputs, p, SDPBackend.CUDNN_ATTENTION),
}
OURS = ("list", "groups")
# PyTorch itself never calls this one on packed tokens: what it refuses shows as a failing kernel.
PRIVATE = ("cudnn, packed",)


def errors(contender: Contender) -> dict[str, float]:
    """|x - reference| / |reference| of a contender without dropout, on the longest sequence.

    That one is whole in a padded batch too. The reference is the formula in fp32.
    """
    inputs = contender.inputs
    batch = inputs.batch
    longest = int(batch.lengths.argmax())
    begin, end = batch.cu_seqlens_host[longest : longest + 2].tolist()
    q, k, v = (
        x[begin:end].transpose(0, 1).float().requires_grad_() for x in inputs.qkv.detach().unbind(1)
    )
    reference = torch.softmax(q @ k.mT * inputs.scale, -1) @ v
    dout = inputs.dout[begin:end].transpose(0, 1).float()
    wanted = [reference, *torch.autograd.grad(reference, (q, k, v), dout)]
    saved = contender.forward()
    found = [saved[0], *contender.backward(saved)]
    result = {}
    for name, x, y in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
        x = contender.packed(x.detach())[begin:end].transpose(0, 1).float()
        result[name] = ((x - y).norm() / y.norm()).item()
    return result
