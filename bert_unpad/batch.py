"""A batch of sequences of different lengths, packed end to end without padding.

Everything that the host has to know about a batch (its lengths, the longest one, the token count,
the length groups) is worked out here once, on the CPU, so that a training step never waits for the
device to tell it a size. `VarlenBatch` describes the packing, `unpad` and `pad` convert between the
padded [B, S, ...] and the packed [T, ...] layout, and `PackedInputs` is one packed pretraining
batch: token ids, labels, and the rows that the last encoder layer has to compute.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bert_unpad import _planner

__all__ = ["LengthGroup", "PackedInputs", "QueryRows", "VarlenBatch", "pad", "unpad"]

# More groups than this cost more in kernel launches than the finer grid sizes save.
MAX_GROUPS = 4
_INT32_MAX = 2**31 - 1
_IGNORE = -100
_DEVICE_TENSORS = ("cu_seqlens", "indices", "position_ids", "order")


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
        found = _planner.length_groups(self.lengths.numpy(), MAX_GROUPS)
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
            ValueError: they are not 1-D, one is negative, or their sum exceeds the int32 range.
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
        host = host.astype(np.int64)
        seqlen = int(host.max(initial=0))
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
        if total > _INT32_MAX:
            raise ValueError(f"a batch may hold at most 2**31 - 1 tokens, got {total}")
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
        return _map_tensors(
            self, _DEVICE_TENSORS, lambda tensor: tensor.to(device, non_blocking=non_blocking)
        )

    def pin_memory(self) -> VarlenBatch:
        """The same batch in page-locked host memory, for asynchronous copies to an accelerator."""
        return _map_tensors(self, _DEVICE_TENSORS, Tensor.pin_memory)


def unpad(x: Tensor, batch: VarlenBatch) -> Tensor:
    """Drops the padding: [B, S, ...] -> [T, ...]. Differentiable.

    Raises:
        ValueError: the first two dimensions are not the batch's [batch_size, seqlen].
    """
    expected = (batch.batch_size, batch.seqlen)
    if x.dim() < 2 or tuple(x.shape[:2]) != expected:
        raise ValueError(f"x must have shape {list(expected)} + [...], got {list(x.shape)}")
    return x.flatten(0, 1).index_select(0, batch.indices)


def pad(x: Tensor, batch: VarlenBatch, value: float = 0) -> Tensor:
    """Puts packed rows back into the padded layout: [T, ...] -> [B, S, ...]. Differentiable.

    Args:
        x: packed rows [T, ...].
        batch: the packing.
        value: what the padded positions are filled with.

    Raises:
        ValueError: the number of rows is not the batch's token count.
    """
    if x.dim() < 1 or x.shape[0] != batch.total:
        raise ValueError(f"x must have shape [{batch.total}, ...], got {list(x.shape)}")
    rows = x.new_full((batch.batch_size * batch.seqlen, *x.shape[1:]), value)
    rows = rows.index_copy(0, batch.indices, x)
    return rows.view(batch.batch_size, batch.seqlen, *x.shape[1:])


@dataclass(frozen=True, eq=False)
class QueryRows:
    """The rows that the last encoder layer computes: first tokens and masked tokens, Q in all.

    The pretraining loss reads nothing else of the last layer's output, so the layer takes queries
    (and everything after attention) for these rows alone, and keys and values for all tokens.
    N is the number of sequences that are not empty; only they have a first token.
    """

    positions: Tensor
    """int64 [Q], ascending: query row -> row of the packed buffer."""
    cu_seqlens: Tensor
    """int32 [B + 1]: sequence b owns the query rows cu_seqlens[b] : cu_seqlens[b + 1]."""
    max_seqlen: int
    """The most query rows of any one sequence."""
    mlm_rows: Tensor
    """int64 [M]: masked token -> query row."""
    cls_rows: Tensor
    """int64 [N]: sequence that is not empty -> query row of its first token."""
    cls_positions: Tensor
    """int64 [N]: the same -> row of the packed buffer."""
    cls_sequences: Tensor
    """int64 [N]: the same -> index within the batch."""
    cls_labels: Tensor
    """int64 [N]: next-sentence labels of the same."""

    @classmethod
    def build(
        cls, cu_seqlens: np.ndarray, masked_positions: np.ndarray, labels: Tensor
    ) -> QueryRows:
        """From the host copies of cu_seqlens [B + 1], masked_positions [M] and labels [B]."""
        starts = cu_seqlens[:-1].astype(np.int64)
        sequences = np.flatnonzero(np.diff(cu_seqlens))
        first = starts[sequences]
        positions = np.union1d(first, masked_positions)
        cu_rows = np.searchsorted(positions, cu_seqlens)
        return cls(
            positions=torch.from_numpy(positions),
            cu_seqlens=torch.from_numpy(cu_rows.astype(np.int32)),
            max_seqlen=int(np.diff(cu_rows).max(initial=0)),
            mlm_rows=torch.from_numpy(np.searchsorted(positions, masked_positions)),
            cls_rows=torch.from_numpy(np.searchsorted(positions, first)),
            cls_positions=torch.from_numpy(first),
            cls_sequences=torch.from_numpy(sequences),
            cls_labels=labels[torch.from_numpy(sequences)],
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> QueryRows:
        """The same rows on `device`."""
        names = _tensor_fields(self)
        return _map_tensors(self, names, lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> QueryRows:
        """The same rows in page-locked host memory."""
        return _map_tensors(self, _tensor_fields(self), Tensor.pin_memory)


@dataclass(frozen=True, eq=False)
class PackedInputs:
    """One packed pretraining batch: what the collator returns and `BertForPreTraining` takes.

    Make one with `build`, on the host; then `.pin_memory()` and `.to(device, non_blocking=True)`.
    """

    batch: VarlenBatch
    input_ids: Tensor
    """int64 [T]."""
    token_type_ids: Tensor
    """int64 [T]."""
    masked_positions: Tensor
    """int64 [M], ascending: rows of the packed buffer whose token is to be predicted."""
    masked_labels: Tensor
    """int64 [M]: the tokens that were there; -100 is left out of the loss."""
    next_sentence_labels: Tensor
    """int64 [B]: 0 = the second segment follows the first, 1 = it is a random one (Hugging Face's
    convention), -100 = none."""
    query_rows: QueryRows
    """What the last layer computes; derived by `build`."""

    @classmethod
    def build(
        cls,
        batch: VarlenBatch,
        input_ids: Tensor,
        token_type_ids: Tensor | None = None,
        masked_positions: Tensor | None = None,
        masked_labels: Tensor | None = None,
        next_sentence_labels: Tensor | None = None,
    ) -> PackedInputs:
        """Checks host tensors and derives the rows of the last layer from them.

        What is left out is taken as: token types of 0, no masked tokens, no next-sentence labels.

        Raises:
            TypeError: a tensor is not int64.
            ValueError: a tensor is not on the CPU or has the wrong shape; masked positions are not
                strictly ascending or lie outside 0 .. T - 1.
        """
        if token_type_ids is None:
            token_type_ids = torch.zeros(batch.total, dtype=torch.int64)
        if (masked_positions is None) != (masked_labels is None):
            raise ValueError("masked_positions and masked_labels go together: give both or none")
        if masked_positions is None or masked_labels is None:
            masked_positions = masked_labels = torch.empty(0, dtype=torch.int64)
        if next_sentence_labels is None:
            next_sentence_labels = torch.full((batch.batch_size,), _IGNORE, dtype=torch.int64)

        if batch.device.type != "cpu":
            raise ValueError(f"batch must be on the CPU, got {batch.device}; move the result")
        masked = masked_positions.shape[0] if masked_positions.dim() else 0
        for name, tensor, size in (
            ("input_ids", input_ids, batch.total),
            ("token_type_ids", token_type_ids, batch.total),
            ("masked_positions", masked_positions, masked),
            ("masked_labels", masked_labels, masked),
            ("next_sentence_labels", next_sentence_labels, batch.batch_size),
        ):
            if tensor.dtype != torch.int64:
                raise TypeError(f"{name} must be int64, got {tensor.dtype}")
            if tensor.device.type != "cpu":
                raise ValueError(f"{name} must be on the CPU, got {tensor.device}; move the result")
            if tuple(tensor.shape) != (size,):
                raise ValueError(f"{name} must have shape [{size}], got {list(tensor.shape)}")
        positions = masked_positions.numpy()
        if masked and (positions[0] < 0 or positions[-1] >= batch.total):
            raise ValueError(f"masked_positions must lie in 0 .. {batch.total - 1}")
        if (np.diff(positions) <= 0).any():
            raise ValueError("masked_positions must be strictly ascending")
        return cls(
            batch=batch,
            input_ids=input_ids,
            token_type_ids=token_type_ids,
            masked_positions=masked_positions,
            masked_labels=masked_labels,
            next_sentence_labels=next_sentence_labels,
            query_rows=QueryRows.build(
                batch.cu_seqlens_host.numpy(), positions, next_sentence_labels
            ),
        )

    @property
    def device(self) -> torch.device:
        """The device of the data."""
        return self.input_ids.device

    @property
    def num_masked(self) -> int:
        """M, the number of masked tokens."""
        return self.masked_positions.shape[0]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedInputs:
        """The same inputs on `device`; the batch's host tensors stay on the host."""
        names = (*_tensor_fields(self), "batch", "query_rows")
        return _map_tensors(self, names, lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedInputs:
        """The same inputs in page-locked host memory; `torch.utils.data.DataLoader` calls this."""
        names = (*_tensor_fields(self), "batch", "query_rows")
        return _map_tensors(self, names, lambda part: part.pin_memory())


def _tensor_fields(packed) -> tuple[str, ...]:
    fields = dataclasses.fields(packed)
    return tuple(f.name for f in fields if isinstance(getattr(packed, f.name), Tensor))


def _map_tensors(packed, names, function):
    """A copy of a dataclass with `function` applied to the named fields; cached values stay."""
    copy = dataclasses.replace(packed, **{name: function(getattr(packed, name)) for name in names})
    cached = {"groups", "group_sizes"} & vars(packed).keys()
    vars(copy).update({name: vars(packed)[name] for name in cached})
    return copy
