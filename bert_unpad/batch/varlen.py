"""How sequences of different lengths are packed end to end, without padding.

Everything that the host has to know about a batch (its lengths, the longest one, the token count,
the length groups) is computed here once, on the CPU. So a training step never waits for the device
to learn a size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from bert_unpad.batch.length_groups import LengthGroup, length_groups
from bert_unpad.batch.tensor_fields import map_tensors

# More groups than this cost more in kernel launches than the finer grid sizes save.
MAX_GROUPS = 4
_INT32_MAX = 2**31 - 1
DEVICE_TENSORS = ("cu_seqlens", "indices", "position_ids", "order", "order_table")


@dataclass(frozen=True, eq=False)
class VarlenBatch:
    """How B sequences with T tokens in all are packed into one [T, ...] buffer.

    Sequence b owns the rows `cu_seqlens[b] : cu_seqlens[b + 1]`. Lengths of 0, B = 0 and T = 0 are
    legal. Make one with `from_lengths`, `from_cu_seqlens` or `from_mask`; they validate their
    argument, once.
    """

    lengths: Tensor
    """int32 [B], on the host: the length of each sequence."""
    cu_seqlens: Tensor
    """int32 [B + 1], on the device of the data: 0, then the running sum of the lengths."""
    cu_seqlens_host: Tensor
    """int32 [B + 1]: `cu_seqlens` on the host."""
    max_seqlen: int
    """The length of the longest sequence; 0 if there is none."""
    total: int
    """The number of tokens T."""
    seqlen: int
    """The length S of the padded layout: that of the mask, or max_seqlen if made from lengths."""
    indices: Tensor
    """int64 [T], on the device: the row b * seqlen + s of each token in the padded layout."""
    position_ids: Tensor
    """int64 [T], on the device: the position of each token. From lengths: 0 .. length - 1 in each
    sequence. From a mask: the column s, the position that Hugging Face's BERT gives the token."""
    order: Tensor
    """int32 [B], on the device: the sequences, longest first; sequences of equal length keep their
    order. A GPU starts them in this order, so that short ones fill the gaps between long ones."""
    order_table: Tensor
    """int32 [4 * B], on the device: for each entry of `order` the sequence, its first token, its
    length, and 0. A GPU finds the work of a block in one load."""

    @property
    def batch_size(self) -> int:
        """The number of sequences B, including empty ones."""
        return self.lengths.shape[0]

    @property
    def device(self) -> torch.device:
        """The device that the packed data is expected on."""
        return self.cu_seqlens.device

    @property
    def fill(self) -> float:
        """The share of the padded layout's B * S positions that hold tokens; 1.0 if B * S is 0."""
        rows = self.batch_size * self.seqlen
        return self.total / rows if rows else 1.0

    @cached_property
    def groups(self) -> tuple[LengthGroup, ...]:
        """Up to 4 groups of sequences of similar length, longest first; computed on first use."""
        return length_groups(self.lengths.numpy(), MAX_GROUPS)

    @cached_property
    def group_sizes(self) -> Tensor:
        """int32 [G, 3], on the host: number of sequences, longest query length and longest key
        length of each group, for self-attention. Groups are consecutive parts of `order`. If B is
        0, this is [[0, 0, 0]].

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
            device: the device of the packed data; by default that of `lengths`.

        Raises:
            TypeError: the lengths are not integers.
            ValueError: they are not 1-D, one is negative, or their sum exceeds the int32 range
                (checked before any memory is allocated).
        """
        host, device = _integers("lengths", "batch", lengths, device)
        if host.size and host.min() < 0:
            raise ValueError(f"lengths: expected 0 or more, got {int(host.min())}")
        # Check before allocating memory, and before a sum of int64 could overflow.
        seqlen = int(host.max(initial=0))
        _check_total("lengths", seqlen)
        host = host.astype(np.int64)
        _check_total("lengths", int(host.sum()))
        return cls._of_lengths(host, device)

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens: Tensor | np.ndarray | Sequence[int],
        device: torch.device | str | None = None,
    ) -> VarlenBatch:
        """Describes sequences by their borders, as other libraries for packed attention pass them.

        A tensor on an accelerator is copied to the host, which waits for the device this once.

        Args:
            cu_seqlens: integers [B + 1]: 0, then the running sum of the lengths.
            device: the device of the packed data; by default that of `cu_seqlens`.

        Raises:
            TypeError: `cu_seqlens` are not integers.
            ValueError: they are not 1-D, do not begin with 0, decrease, or exceed the int32 range
                (checked before any memory is allocated).
        """
        host, device = _integers("cu_seqlens", "batch + 1", cu_seqlens, device)
        if host.size == 0 or host[0] != 0:
            found = int(host[0]) if host.size else "no number"
            raise _wrong_cu_seqlens(f"must start with 0, got {found}")
        falls = np.flatnonzero(host[1:] < host[:-1])
        if falls.size:
            before, after = host[falls[0] : falls[0] + 2].tolist()
            raise _wrong_cu_seqlens(f"must not decrease, got {after} after {before}")
        _check_total("cu_seqlens", int(host[-1]))
        return cls._of_lengths(np.diff(host.astype(np.int64)), device)

    @classmethod
    def from_mask(cls, mask: Tensor) -> VarlenBatch:
        """Describes the tokens that the attention mask of a padded batch marks with 1.

        The ones may be anywhere: padding on either side, holes and rows of zeros are allowed.
        A mask on an accelerator is copied to the host, which waits for the device this once.

        Args:
            mask: [B, S], bool, integer or floating point, of zeros and ones only.

        Raises:
            TypeError: the mask is not a tensor, or is complex.
            ValueError: it is not 2-D, or holds anything but 0 and 1 (as an additive mask does).
        """
        if not isinstance(mask, Tensor):
            raise TypeError(f"mask: expected a torch.Tensor, got {type(mask).__name__}")
        if mask.is_complex():
            raise TypeError(f"mask: expected bool, integer or floating point, got {mask.dtype}")
        if mask.dim() != 2:
            raise ValueError(f"mask: expected shape [batch, seqlen], got {list(mask.shape)}")
        host = mask.detach().cpu()
        values = (host.float() if host.is_floating_point() else host).numpy()
        kept = values != 0
        if not np.array_equal(values, kept):
            raise ValueError(
                "mask: expected only 0 (padding) and 1 (token); "
                "an additive mask (0 and a large negative number) is not supported"
            )
        indices = np.flatnonzero(kept)
        seqlen = mask.shape[1]
        return cls._make(kept.sum(1), seqlen, indices, indices % max(seqlen, 1), mask.device)

    @classmethod
    def _of_lengths(cls, lengths: np.ndarray, device: torch.device) -> VarlenBatch:
        seqlen, total = int(lengths.max(initial=0)), int(lengths.sum())
        starts = np.cumsum(lengths) - lengths
        position_ids = np.arange(total) - np.repeat(starts, lengths)
        indices = position_ids + np.repeat(np.arange(lengths.size) * seqlen, lengths)
        return cls._make(lengths, seqlen, indices, position_ids, device)

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
        _check_total("lengths", total)
        cu_seqlens = np.zeros(lengths.size + 1, np.int32)
        np.cumsum(lengths, out=cu_seqlens[1:])
        cu_seqlens_host = torch.from_numpy(cu_seqlens)
        order = np.argsort(-lengths, kind="stable").astype(np.int32)
        order_table = np.zeros((lengths.size, 4), np.int32)
        for column, values in enumerate((order, cu_seqlens[order], lengths[order])):
            order_table[:, column] = values
        batch = cls(
            lengths=torch.from_numpy(lengths.astype(np.int32)),
            cu_seqlens=cu_seqlens_host,
            cu_seqlens_host=cu_seqlens_host,
            max_seqlen=int(lengths.max(initial=0)),
            total=total,
            seqlen=seqlen,
            indices=torch.from_numpy(indices.astype(np.int64, copy=False)),
            position_ids=torch.from_numpy(position_ids.astype(np.int64, copy=False)),
            order=torch.from_numpy(order),
            # Flat: torch.compile would take a size of four for the number of sequences.
            order_table=torch.from_numpy(order_table.ravel()),
        )
        if device.type == "cuda":
            batch = batch.pin_memory()  # so that the copies do not make the host wait
        return batch if device.type == "cpu" else batch.to(device, non_blocking=True)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> VarlenBatch:
        """Returns the batch with its device tensors on `device`; host tensors are shared."""
        return map_tensors(
            self, DEVICE_TENSORS, lambda tensor: tensor.to(device, non_blocking=non_blocking)
        )

    def pin_memory(self) -> VarlenBatch:
        """Returns the batch in page-locked host memory, for asynchronous copies to a GPU."""
        return map_tensors(self, DEVICE_TENSORS, Tensor.pin_memory)


def _integers(
    name: str,
    size: str,
    values: Tensor | np.ndarray | Sequence[int],
    device: torch.device | str | None,
) -> tuple[np.ndarray, torch.device]:
    """Copies a vector of integers to the host; returns it, and the device of the packed data."""
    if device is None:
        device = values.device if isinstance(values, Tensor) else "cpu"
    host = np.asarray(values.detach().cpu().numpy() if isinstance(values, Tensor) else values)
    if host.ndim != 1:
        raise ValueError(f"{name}: expected shape [{size}], got {list(host.shape)}")
    if host.size == 0:
        host = host.astype(np.int64)  # numpy calls an empty list float64
    if host.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected integers, got {host.dtype}")
    return host, torch.device(device)


def _wrong_cu_seqlens(fault: str) -> ValueError:
    """An error that says what operators do; the words are csrc/attention/cu_seqlens_errors.h's."""
    return ValueError(f"cu_seqlens {fault}; VarlenBatch.from_lengths takes lengths")


def _check_total(name: str, tokens: int) -> None:
    if tokens > _INT32_MAX:
        raise ValueError(f"{name}: expected at most 2**31 - 1 tokens in a batch, got {tokens}")
