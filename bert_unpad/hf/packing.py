"""How one call's tokens are packed, and the way from the padded layout there and back.

In eager mode a `VarlenBatch` holds all sizes on the host. `torch.compile` cannot trace the host
work that makes one, so there a custom operator returns the index tensors, whose length is a symbol:
one compiled graph serves all lengths. Its longest sequence is bounded by the padded length.

Where a model's head reads only some rows of the last layer's output, `Packing.last` says which.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from bert_unpad import ops
from bert_unpad.batch import VarlenBatch
from bert_unpad.batch.rows import gather_rows, scatter_rows

__all__ = ["IGNORE", "LastRows", "Packing"]

IGNORE = -100


@dataclass(eq=False)
class LastRows:
    """Rows that the last layer computes: queries and all that follows; keys are those of all."""

    layer: nn.Module
    """The last layer."""
    positions: Tensor
    """int64 [Q], ascending: row of the last layer's output -> packed row."""
    cu_seqlens: Tensor
    """int32 [B + 1]: sequence b owns the output rows cu_seqlens[b] : cu_seqlens[b + 1]."""
    max_seqlen: int
    """An upper bound of their number in a sequence."""
    input: Tensor | None = None
    """[1, T, hidden]: what the last layer was given; it leaves this here, for `complete`."""

    def complete(self, x: Tensor, packing: Packing) -> Tensor:
        """The last layer's output for all tokens, [1, T, hidden].

        With dropout, the other rows have masks of their own; those of x [1, Q, hidden] stay.
        """
        rest = self.layer(self.input, packing=dataclasses.replace(packing, last=None))
        return rest.index_copy(1, self.positions, x)


@dataclass(frozen=True, eq=False)
class Packing:
    """T packed tokens of B sequences and where they come from."""

    batch: VarlenBatch | Tensor
    """The packing as attention takes it: a VarlenBatch, or int32 cu_seqlens."""
    cu_seqlens: Tensor
    """int32 [B + 1], on the device of the data."""
    max_seqlen: int
    """An upper bound of the sequences' lengths."""
    shape: tuple[int, int]
    """(B, S) of the padded layout; (1, T) if the input came packed."""
    indices: Tensor | None
    """int64 [T]: packed row -> b * S + s; None where nothing is padded."""
    columns: Tensor | None
    """int64 [T]: packed row -> s; None where nothing is padded."""
    given: bool = False
    """Whether the input came packed, with `cu_seq_lens_q`."""
    first_is_padding: bool = False
    """Whether a sequence's first column is masked out; what reads it has to see the stock's."""
    last: LastRows | None = None
    """What the last layer computes, if not all rows."""

    @classmethod
    def dense(cls, batch_size: int, seqlen: int, device: torch.device) -> Packing:
        """All B * S tokens are real."""
        if torch.compiler.is_compiling():
            cu_seqlens = torch.arange(batch_size + 1, dtype=torch.int32, device=device) * seqlen
            return cls(cu_seqlens, cu_seqlens, seqlen, (batch_size, seqlen), None, None)
        batch = VarlenBatch.from_lengths(np.full(batch_size, seqlen), device)
        return cls(batch, batch.cu_seqlens, seqlen, (batch_size, seqlen), None, None)

    @classmethod
    def from_mask(cls, mask: Tensor, reads_first: bool) -> Packing:
        """From a [B, S] mask of zeros and ones.

        Raises:
            ValueError: other values. When compiled (where it cannot be left to the stock modules),
                also a first column that is masked out if `reads_first`.
        """
        shape = (mask.shape[0], mask.shape[1])
        if torch.compiler.is_compiling():
            indices, cu_seqlens = torch.ops.bert_unpad.hf_plan(mask, reads_first)
            columns = indices % shape[1]
            return cls(cu_seqlens, cu_seqlens, shape[1], shape, indices, columns)
        batch = VarlenBatch.from_mask(mask)
        if batch.total == shape[0] * shape[1]:
            return cls(batch, batch.cu_seqlens, batch.max_seqlen, shape, None, None)
        first_is_padding = reads_first and not bool((mask[:, 0] == 1).all())
        return cls(
            batch,
            batch.cu_seqlens,
            batch.max_seqlen,
            shape,
            batch.indices,
            batch.position_ids,
            first_is_padding=first_is_padding,
        )

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, max_seqlen: int | None, tokens: int) -> Packing:
        """Of input that is packed already: `cu_seqlens` [B + 1] over `tokens` tokens.

        Raises:
            ValueError: they do not rise from 0 to `tokens`.
        """
        shape = (1, tokens)
        if torch.compiler.is_compiling():
            # The operators check cu_seqlens.
            cu_seqlens = cu_seqlens.to(torch.int32)
            columns = _columns(cu_seqlens, tokens)
            limit = tokens if max_seqlen is None else max_seqlen
            return cls(cu_seqlens, cu_seqlens, limit, shape, None, columns, given=True)
        host = cu_seqlens.detach().cpu().numpy()
        if host.ndim != 1 or host.size < 1 or host[0] != 0 or host[-1] != tokens:
            raise ValueError(
                f"cu_seq_lens_q must rise from 0 to the number of tokens, {tokens}, "
                f"got {host.tolist()}"
            )
        batch = VarlenBatch.from_lengths(np.diff(host), cu_seqlens.device)
        return cls(
            batch, batch.cu_seqlens, batch.max_seqlen, shape, None, batch.position_ids, given=True
        )

    def pack(self, x: Tensor) -> Tensor:
        """[B, S, ...] -> [1, T, ...]. Differentiable."""
        flat = x.flatten(0, 1)
        return (flat if self.indices is None else gather_rows(flat, self.indices))[None]

    def pad(self, x: Tensor) -> Tensor:
        """[1, T, ...] -> [B, S, ...] with zeros at the padding. Differentiable."""
        if self.indices is None:
            return x.reshape(*self.shape, *x.shape[2:])
        rows = scatter_rows(x[0], self.indices, self.shape[0] * self.shape[1])
        return rows.view(*self.shape, *x.shape[2:])

    def narrow(self, layer: nn.Module, rows: Tensor | None, first: bool) -> Packing:
        """The same packing, with a last layer that computes a part of its rows.

        Args:
            layer: the last layer.
            rows: int64 [M], ascending packed rows that are read; None if there are none.
            first: whether the first row of each sequence is read too; no sequence is empty then.
        """
        positions = rows
        if first:
            firsts = self.cu_seqlens[:-1].long()
            positions = firsts if rows is None else _union(firsts, rows)
        cu_seqlens = torch.searchsorted(positions, self.cu_seqlens, out_int32=True)
        bound = 1 if rows is None else self.max_seqlen
        return dataclasses.replace(self, last=LastRows(layer, positions, cu_seqlens, bound))

    def first_rows(self) -> Tensor:
        """int64 [B]: the row of each sequence's first token in the last layer's output."""
        return (self.cu_seqlens if self.last is None else self.last.cu_seqlens)[:-1].long()

    def output_rows(self, rows: Tensor) -> Tensor:
        """int64 [M]: packed rows -> rows of the last layer's output."""
        return rows if self.last is None else torch.searchsorted(self.last.positions, rows)

    def attend(self, qkv: Tensor, dropout_p: float, scale: float | None = None) -> Tensor:
        """`varlen_attention` of qkv [T, 3, heads, head_dim]."""
        return ops.varlen_attention(
            qkv, self.batch, self.max_seqlen, dropout_p=dropout_p, scale=scale
        )

    def attend_last(self, q: Tensor, kv: Tensor, dropout_p: float) -> Tensor:
        """Attention of the last layer's rows q [Q, heads, head_dim] over kv [T, 2, ...]."""
        assert self.last is not None
        return ops.varlen_cross_attention(
            q,
            kv,
            self.last.cu_seqlens,
            self.cu_seqlens,
            self.last.max_seqlen,
            self.max_seqlen,
            dropout_p=dropout_p,
            order=self.batch.order if isinstance(self.batch, VarlenBatch) else None,
        )

    def labelled(self, labels: Tensor) -> tuple[Tensor, Tensor] | None:
        """Packed rows [M] and labels [M] of the positions of `labels` [B, S] that are not -100.

        None if a padded position has a label: what the stock model computes there is its own.
        Where that cannot be found out beforehand (compiled), a ValueError says so.
        """
        flat = labels.reshape(-1)
        if torch.compiler.is_compiling():
            return torch.ops.bert_unpad.hf_labelled(flat, self.indices)
        return _labelled(flat, self.indices)


def _columns(cu_seqlens: Tensor, tokens: int) -> Tensor:
    rows = torch.arange(tokens, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens, rows, right=True, out_int32=False) - 1
    return rows - cu_seqlens[sequence]


def _labelled(flat: Tensor, indices: Tensor | None) -> tuple[Tensor, Tensor] | None:
    if indices is None:
        rows = (flat != IGNORE).nonzero().flatten()
        return rows, flat.index_select(0, rows)
    packed = flat.index_select(0, indices)
    rows = (packed != IGNORE).nonzero().flatten()
    if rows.shape[0] != int((flat != IGNORE).sum()):
        return None
    return rows, packed.index_select(0, rows)


@torch.library.custom_op("bert_unpad::hf_plan", mutates_args=())
def _plan(mask: Tensor, reads_first: bool) -> tuple[Tensor, Tensor]:
    batch = VarlenBatch.from_mask(mask)
    if reads_first and not bool((mask[:, 0] == 1).all()):
        raise ValueError(
            "attention_mask leaves out a sequence's first position, which this model reads; "
            "a compiled model cannot leave that to the stock modules: pad on the right, "
            "or do not compile"
        )
    cu_seqlens = batch.cu_seqlens
    return batch.indices, cu_seqlens.clone() if cu_seqlens is batch.cu_seqlens_host else cu_seqlens


@_plan.register_fake
def _(mask, reads_first):
    tokens = torch.library.get_ctx().new_dynamic_size()
    return (
        mask.new_empty((tokens,), dtype=torch.int64),
        mask.new_empty((mask.shape[0] + 1,), dtype=torch.int32),
    )


@torch.library.custom_op("bert_unpad::hf_union", mutates_args=())
def _union(left: Tensor, right: Tensor) -> Tensor:
    return torch.cat([left, right]).unique()


@_union.register_fake
def _(left, right):
    return left.new_empty((torch.library.get_ctx().new_dynamic_size(),))


@torch.library.custom_op("bert_unpad::hf_labelled", mutates_args=())
def _labelled_op(labels: Tensor, indices: Tensor | None) -> tuple[Tensor, Tensor]:
    found = _labelled(labels, indices)
    if found is None:
        raise ValueError(
            "labels must be -100 where attention_mask is 0: a compiled model cannot leave "
            "labels at padded positions to the stock modules"
        )
    return found


@_labelled_op.register_fake
def _(labels, indices):
    count = torch.library.get_ctx().new_dynamic_size()
    return (
        labels.new_empty((count,), dtype=torch.int64),
        labels.new_empty((count,)),
    )
