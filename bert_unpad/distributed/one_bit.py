"""OneBitAllreduce: averages a buffer over ranks with one bit a value, with error feedback."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bert_unpad.distributed.collectives import all_gather_single
from bert_unpad.ops import multi_tensor_l2norm, sign_mean_, sign_pack_, sign_scale, sign_unpack_

# A rank's part begins at a byte of the packed signs whose address is a multiple of 16.
_PART = 128
_ERRORS = ("worker_error", "server_error")


class OneBitAllreduce:
    """Averages a float32 buffer over ranks; each value travels as its sign, both ways.

    Each rank compresses its buffer (the worker's side), and sends a part of the signs to each other
    rank. A rank averages the parts it gets, compresses the average (the server's side), and sends
    it to all. What a compression loses is added to the next buffer, or average, before that is
    compressed (Tang et al., "1-bit Adam", 2021, arXiv:2102.02888, algorithm 1). `ops.sign_pack_`
    says what the compression is. Scales, one a rank and side, travel as float32.

    One scale suits values of one size. `use_factors` makes values of different sizes alike before
    they are compressed, and sends nothing more.

    Per rank that are (R - 1) / R * numel / 4 bytes and 8 (R - 1) bytes of scales for R ranks: a
    32nd of what a ring sends of float32. The errors take 4 * numel * (1 + 1 / R) bytes of memory.
    The result has the same bits on all ranks. One rank keeps its values: nothing is compressed.

    Args:
        numel: number of values.
        device: of the buffers.
        group: the ranks, by default all; one if torch.distributed is not initialised.

    Raises:
        ValueError: numel is negative.
    """

    def __init__(
        self, numel: int, device: torch.device | str, group: dist.ProcessGroup | None = None
    ) -> None:
        if numel < 0:
            raise ValueError(f"numel: expected 0 or more, got {numel}")
        self._group = group
        self._ranks = dist.get_world_size(group) if dist.is_initialized() else 1
        self._numel = numel
        self._factors: Tensor | None = None
        self.bytes_sent = 0
        """Bytes that this rank's signs and scales took to reach the other ranks so far."""
        if self._ranks == 1:
            return
        part = -(-numel // (self._ranks * _PART)) * _PART
        first = min(dist.get_rank(group) * part, numel)
        own = min(part, numel - first)
        self._own = slice(first, first + own)  # what this rank averages
        self.worker_error = torch.zeros(numel, device=device)
        self.server_error = torch.zeros(own, device=device)
        rows = (self._ranks, part // 8)
        self._sent, self._received = (
            torch.zeros(rows, dtype=torch.uint8, device=device) for _ in range(2)
        )
        self._average = torch.zeros(part // 8, dtype=torch.uint8, device=device)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self._ranks

    def use_factors(self, factors: Tensor) -> None:
        """Multiplies buffers by factors before they are compressed, and averages by 1 / factors.

        Errors so far go on with the new factors.

        Args:
            factors: float32 [numel], the same on all ranks; powers of 2, which round nothing.
        """
        if self._ranks > 1:
            change = factors if self._factors is None else factors / self._factors
            self.worker_error.mul_(change)
            self.server_error.mul_(change[self._own])
            self._factors = factors

    def average_(self, buffer: Tensor, found_inf: Tensor | None = None) -> Tensor:
        """Replaces the buffer by its compressed average; all ranks must call it.

        The host does not wait on a GPU.

        Args:
            buffer: float32 [numel], contiguous.
            found_inf: float32 [] or [1]; above 0 where this rank must not take part.

        Returns:
            float32 [], the same on all ranks: not finite where some rank's buffer is not, or its
            `found_inf` is above 0. Then no error has changed, and the buffer means nothing.

        Raises:
            ValueError: the buffer has another dtype or number of elements.
        """
        if buffer.dtype != torch.float32 or buffer.numel() != self._numel:
            raise ValueError(
                f"buffer: expected float32 with {self._numel} elements, got {buffer.dtype} with "
                f"{buffer.numel()}"
            )
        if self._ranks == 1:
            return _unless(found_inf, multi_tensor_l2norm([buffer])[0])
        if self._numel == 0:
            return _unless(found_inf, buffer.new_zeros(()))
        if self._factors is not None:
            buffer.mul_(self._factors)
        own = sign_scale(buffer, self.worker_error)
        scales = self._gather_scales(_unless(found_inf, own))
        guard = scales.sum()
        packed = self._sent.view(-1)[: -(-self._numel // 8)]
        sign_pack_(buffer, self.worker_error, packed, own, guard=guard)
        dist.all_to_all_single(self._received, self._sent, group=self._group)
        sign_mean_(self._received, scales, self.server_error, add=True, guard=guard)
        own = sign_scale(None, self.server_error)
        packed = self._average[: -(-self.server_error.numel() // 8)]
        sign_pack_(None, self.server_error, packed, own, guard=guard)
        all_gather_single(self._received.view(-1), self._average, group=self._group)
        sign_unpack_(self._received, self._gather_scales(own), buffer)
        if self._factors is not None:
            buffer.div_(self._factors)
        self.bytes_sent += (self._ranks - 1) * 2 * self._average.numel()
        return guard

    def _gather_scales(self, own: Tensor) -> Tensor:
        scales = own.new_empty(self._ranks)
        all_gather_single(scales, own.reshape(1), group=self._group)
        self.bytes_sent += (self._ranks - 1) * own.element_size()
        return scales

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's errors, of values without factors; those of other ranks differ."""
        if self._ranks == 1:
            return {}
        errors = {name: getattr(self, name) for name in _ERRORS}
        if self._factors is None:
            return errors
        return {name: error / self._factors_of(name) for name, error in errors.items()}

    def _factors_of(self, name: str) -> Tensor:
        assert self._factors is not None
        return self._factors if name == "worker_error" else self._factors[self._own]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state_dict` of the same rank among as many.

        Raises:
            ValueError: the errors have other sizes.
        """
        for name in _ERRORS if self._ranks > 1 else ():
            own, saved = getattr(self, name), state.get(name)
            if saved is None or saved.shape != own.shape:
                got = "none" if saved is None else list(saved.shape)
                raise ValueError(f"{name}: expected the shape {list(own.shape)}, got {got}")
            own.copy_(saved)
            if self._factors is not None:
                own.mul_(self._factors_of(name))


def _unless(found_inf: Tensor | None, value: Tensor) -> Tensor:
    """The value, or infinity where `found_inf` is above 0."""
    if found_inf is None:
        return value
    return torch.where(found_inf.reshape(()).to(value.device) > 0, torch.inf, value)
