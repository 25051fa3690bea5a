"""How a batch of sequences of different lengths lies packed end to end, without padding.

Everything that the host has to know about a batch (its lengths, the longest one, the token count,
the length groups) is worked out here once, on the CPU, so that a training step never waits for the
device to tell it a size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bert_unpad import _balancer
from bert_unpad.batch._fields import map_tensors

__all__ = ["LengthGroup", "VarlenBatch"]

# More groups than this cost more in kernel launches than the finer grid sizes save.
MAX_GROUPS = 4
_INT32_MAX = 2**31 - 1
DEVICE_TENSORS = ("cu_seqlens", "indices", "position_ids", "order")


class LengthGroup(NamedTuple):
    """Sequences of similar length, which attention can process with one launch configuration."""

    max_seqlen: int
    """The longest length in the group."""
    sequences: tuple[int, ...]
    """Indices of the sequences within the batch."""


@dataclass(frozen=True, eq=False)
class VarlenBatch:
    """How B sequences with T tokens in all lie in one packed [T, ...] buffer.

    Sequence b owns the rows `cu_seqlens[b] : cu_seqlens[b + 1]`. Lengths of 0, B = 0 and T = 0 are
    legal. Make one with `from_lengths` or `from_mask`; both validate their argument, once.
    """

    lengths: Tensor
    """int32 [B], on the host."""
    cu_seqlens: Tensor
    """int32 [B + 1], on the device of the data: 0, then the running sum of the lengths."""
    cu_seqlens_host: Tensor
    """int32 [B + 1]: the same numbers on the host."""
    max_seqlen: int
    """The longest length; 0 if there is none."""
    total: int
    """T, the number of tokens."""
    seqlen: int
    """S, the length of the padded layout: that of the mask, or max_seqlen if made from lengths."""
    indices: Tensor
    """int64 [T], on the device: packed row -> b * seqlen + s, its row in the padded layout."""
    position_ids: Tensor
    """int64 [T], on the device. From lengths: 0 .. length - 1 in each sequence. From a mask: the
    column s, which is the position that Hugging Face's BERT gives the token."""
    order: Tensor
    """int32 [B], on the device: the sequences longest first, those of a length as they lie. Started
    in this order, short ones fill the gaps that the long ones leave."""

    @property
    def batch_size(self) -> int:
        """B, the number of sequences, empty ones included."""
        return self.lengths.shape[0]

    @property
    def device(self) -> torch.device:
        """The device that the packed data is expected on."""
        return self.cu_seqlens.device

    @property
    def fill(self) -> float:
        """Real tokens as a fraction of the padded layout's B * S; 1.0 if that is empty."""
        rows = self.batch_size * self.seqlen
        return self.total / rows if rows else 1.0

    @cached_property
    def groups(self) -> tuple[LengthGroup, ...]:
        """At most 4 groups of sequences of similar length, longest first; computed on first use."""
        found = _balancer.length_groups(self.lengths.numpy(), MAX_GROUPS)
        return tuple(LengthGroup(int(longest), tuple(members)) for longest, members in found)

    @cached_property
    def group_sizes(self) -> Tensor:
        """int32 [G, 3], on the host: (sequences, longest query run, longest key run) of each group
        for self-attention; the groups are consecutive runs of `order`. [[0, 0, 0]] if B is 0.

        Computed on first use by code that `torch.compile` cannot trace: read it once before a
        compiled function does.
        """
        rows = [(len(group.sequences), group.max_seqlen, group.max_seqlen) for group in self.groups]
        return torch.tensor(rows or [(0, 0, 0)], dtype=torch.int32)

    @classmethod
    def from_lengths(
        cls,
        lengths: Tensor | np.ndarray | Sequence[int],
        device: torch.device | str | None = None,
    ) -> VarlenBatch:
        """Describes sequences of the given lengths.

        Args:
            lengths: non-negative integers [B].
            device: where the packed data will be; by default where `lengths` is.

        Raises:
            TypeError: the lengths are not integers.
            ValueError: they are not 1-D, one is negative, or their sum exceeds the int32 range; no
                memory has been asked for then.
        """
        if device is None:
            device = lengths.device if isinstance(lengths, Tensor) else "cpu"
        host = lengths.detach().cpu().numpy() if isinstance(lengths, Tensor) else lengths
        host = np.asarray(host)
        if host.ndim != 1:
            raise ValueError(f"lengths must be 1-D [batch], got shape {list(host.shape)}")
        if host.size == 0:
            host = host.astype(np.int64)  # numpy calls an empty list float64
        if host.dtype.kind not in "iu":
            raise TypeError(f"lengths must be integers, got {host.dtype}")
        if host.size and host.min() < 0:
            raise ValueError(f"lengths must be >= 0, got {int(host.min())}")
        # Before any memory is asked for, and before a sum of int64 could overflow.
        seqlen = int(host.max(initial=0))
        _check_total(seqlen)
        host = host.astype(np.int64)
        _check_total(int(host.sum()))
        starts = np.cumsum(host) - host
        position_ids = np.arange(int(host.sum())) - np.repeat(starts, host)
        indices = position_ids + np.repeat(np.arange(host.size) * seqlen, host)
        return cls._make(host, seqlen, indices, position_ids, torch.device(device))

    @classmethod
    def from_mask(cls, mask: Tensor) -> VarlenBatch:
        """Describes the tokens that a padded batch's attention mask marks with 1.

        The ones may lie anywhere: padding on either side, holes and rows of zeros are all right.
        A mask on an accelerator is copied to the host, which waits for the device this one time.

        Args:
            mask: [B, S], bool, integer or floating point, of zeros and ones only.

        Raises:
            TypeError: not a tensor, or a complex one.
            ValueError: not 2-D, or an element is neither 0 nor 1 (for example an additive mask).
        """
        if not isinstance(mask, Tensor):
            raise TypeError(f"mask must be a torch.Tensor, got {type(mask).__name__}")
        if mask.is_complex():
            raise TypeError(f"mask must be bool, integer or floating point, got {mask.dtype}")
        if mask.dim() != 2:
            raise ValueError(f"mask must be 2-D [batch, seqlen], got shape {list(mask.shape)}")
        host = mask.detach().cpu()
        ones = host == 1
        if not bool((ones | (host == 0)).all()):
            raise ValueError(
                "mask must hold only 0 (padding) and 1 (token); "
                "an additive mask (0 and a large negative number) is not supported"
            )
        kept = ones.numpy()
        indices = np.flatnonzero(kept)
        seqlen = mask.shape[1]
        return cls._make(kept.sum(1), seqlen, indices, indices % max(seqlen, 1), mask.device)

    @classmethod
    def _make(
        cls,
        lengths: np.ndarray,
        seqlen: int,
        indices: np.ndarray,
        position_ids: np.ndarray,
        device: torch.device,
    ) -> VarlenBatch:
        total = int(indices.size)
        _check_total(total)
        cu_seqlens = np.zeros(lengths.size + 1, np.int32)
        np.cumsum(lengths, out=cu_seqlens[1:])
        cu_seqlens_host = torch.from_numpy(cu_seqlens)
        batch = cls(
            lengths=torch.from_numpy(lengths.astype(np.int32)),
            cu_seqlens=cu_seqlens_host,
            cu_seqlens_host=cu_seqlens_host,
            max_seqlen=int(lengths.max(initial=0)),
            total=total,
            seqlen=seqlen,
            indices=torch.from_numpy(indices.astype(np.int64)),
            position_ids=torch.from_numpy(position_ids.astype(np.int64)),
            order=torch.from_numpy(np.argsort(-lengths, kind="stable").astype(np.int32)),
        )
        if device.type == "cuda":
            batch = batch.pin_memory()  # so that the copies do not make the host wait
        return batch if device.type == "cpu" else batch.to(device, non_blocking=True)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> VarlenBatch:
        """The same batch with its device tensors on `device`; the host tensors stay shared."""
        return map_tensors(
            self, DEVICE_TENSORS, lambda tensor: tensor.to(device, non_blocking=non_blocking)
        )

    def pin_memory(self) -> VarlenBatch:
        """The same batch in page-locked host memory, for asynchronous copies to an accelerator."""
        return map_tensors(self, DEVICE_TENSORS, Tensor.pin_memory)


def _check_total(tokens: int) -> None:
    if tokens > _INT32_MAX:
        raise ValueError(f"a batch may hold at most 2**31 - 1 tokens, got {tokens}")
