"""How the tokens of one call are packed, and conversion from the padded layout and back.

In eager mode a `VarlenBatch` holds all sizes on the host. `torch.compile` cannot trace the host
code that makes one. There a custom operator returns the index tensors, whose length is symbolic, so
that one compiled graph serves all lengths; the padded length bounds the longest sequence.

If a model's head reads only some rows of the last layer's output, `Packing.last` names them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bert_unpad import ops
from bert_unpad.batch import VarlenBatch
from bert_unpad.batch.rows import gather_rows, scatter_rows

IGNORE = -100


@dataclass(frozen=True, eq=False)
class LastRows:
    """The rows for which the last layer computes queries and its output; keys are of all rows."""

    positions: Tensor
    """int64 [Q], ascending: the packed row of each row of the last layer's output."""
    cu_seqlens: Tensor
    """int32 [B + 1]: sequence b owns the output rows cu_seqlens[b] : cu_seqlens[b + 1]."""
    max_seqlen: int
    """Upper bound on the number of output rows of a sequence."""


@dataclass(frozen=True, eq=False)
class Packing:
    """How T tokens of B sequences are packed, and their positions in the padded layout."""

    batch: VarlenBatch | Tensor
    """The argument for attention: a VarlenBatch, or int32 cu_seqlens."""
    cu_seqlens: Tensor
    """int32 [B + 1], on the device of the data: sequence b owns cu_seqlens[b] : [b + 1]."""
    max_seqlen: int
    """Upper bound on the length of a sequence."""
    shape: tuple[int, int]
    """The shape (B, S) of the padded layout; (1, T) if the input is packed already."""
    indices: Tensor | None
    """int64 [T]: the row b * S + s of each token in the padded layout; None without padding."""
    columns: Tensor | None
    """int64 [T]: the column s of each token in the padded layout; None without padding."""
    given: bool = False
    """Whether the caller passed packed input, with `cu_seq_lens_q`."""
    stock_reason: str | None = None
    """Why only the stock modules compute what they do with this mask."""
    last: LastRows | None = None
    """The rows that the last layer computes; None for all rows."""
    positions: Tensor | None = None
    """int64 [T]: the position of each token, where operators may rotate by it."""

    @classmethod
    def dense(cls, batch_size: int, seqlen: int, device: torch.device) -> Packing:
        """Makes the packing of a batch without padding: all B * S tokens are real."""
        if torch.compiler.is_compiling():
            cu_seqlens = torch.arange(batch_size + 1, dtype=torch.int32, device=device) * seqlen
            return cls(cu_seqlens, cu_seqlens, seqlen, (batch_size, seqlen), None, None)
        batch = VarlenBatch.from_lengths(np.full(batch_size, seqlen), device)
        return cls(batch, batch.cu_seqlens, seqlen, (batch_size, seqlen), None, None)

    @classmethod
    def from_mask(cls, mask: Tensor, reads_first: bool, distances: bool = False) -> Packing:
        """Makes the packing of a [B, S] mask of zeros and ones.

        Args:
            mask: the mask.
            reads_first: whether something reads the first column of the output.
            distances: whether attention counts the distance of tokens, in which stock modules count
                padding too.

        Raises:
            ValueError: the mask holds other values. In a compiled model, which cannot run the
                stock modules instead: also what `stock_reason` is for.
        """
        shape = (mask.shape[0], mask.shape[1])
        if torch.compiler.is_compiling():
            indices, cu_seqlens = torch.ops.bert_unpad.hf_pack(mask, reads_first, distances)
            columns = indices % shape[1]
            return cls(cu_seqlens, cu_seqlens, shape[1], shape, indices, columns)
        batch = VarlenBatch.from_mask(mask)
        if batch.total == shape[0] * shape[1]:
            return cls(batch, batch.cu_seqlens, batch.max_seqlen, shape, None, None)
        return cls(
            batch,
            batch.cu_seqlens,
            batch.max_seqlen,
            shape,
            batch.indices,
            batch.position_ids,
            stock_reason=_unfit(mask, reads_first, distances),
        )

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, max_seqlen: int | None, tokens: int) -> Packing:
        """Makes the packing of packed input: `cu_seqlens` [B + 1] over `tokens` tokens.

        Raises:
            ValueError: `cu_seqlens` does not rise from 0 to `tokens`.
        """
        shape = (1, tokens)
        if torch.compiler.is_compiling():
            # The operators check cu_seqlens.
            cu_seqlens = cu_seqlens.to(torch.int32)
            columns = _columns(cu_seqlens, torch.arange(tokens, device=cu_seqlens.device))
            limit = tokens if max_seqlen is None else max_seqlen
            return cls(cu_seqlens, cu_seqlens, limit, shape, None, columns, given=True)
        try:
            batch = VarlenBatch.from_cu_seqlens(cu_seqlens)
        except (TypeError, ValueError):
            batch = None
        if batch is None or batch.total != tokens:
            raise ValueError(
                f"cu_seq_lens_q: expected integers that rise from 0 to the number of tokens, "
                f"{tokens}, got {cu_seqlens.tolist()}"
            )
        return cls(
            batch, batch.cu_seqlens, batch.max_seqlen, shape, None, batch.position_ids, given=True
        )

    def token_columns(self) -> Tensor:
        """Returns the column of each token in the padded layout, int64 [T], without padding too."""
        if self.columns is not None:
            return self.columns
        rows, columns = self.shape
        return torch.arange(columns, device=self.cu_seqlens.device).repeat(rows)

    def pack(self, x: Tensor) -> Tensor:
        """Packs [B, S, ...] into [1, T, ...]. Differentiable."""
        flat = x.flatten(0, 1)
        return (flat if self.indices is None else gather_rows(flat, self.indices))[None]

    def pad(self, x: Tensor) -> Tensor:
        """Pads [1, T, ...] to [B, S, ...] with zeros. Differentiable."""
        if self.indices is None:
            return x.reshape(*self.shape, *x.shape[2:])
        rows = scatter_rows(x[0], self.indices, self.shape[0] * self.shape[1])
        return rows.view(*self.shape, *x.shape[2:])

    def narrow(self, rows: Tensor | None, first: bool) -> Packing:
        """Returns the same packing with a last layer that computes only some rows.

        Args:
            rows: packed rows to compute, int64 [M], ascending; None for first rows only.
            first: also compute the first row of each sequence; then no sequence may be empty.
        """
        if rows is None:
            positions = self.cu_seqlens[:-1].long()
        else:
            positions = _union(self.cu_seqlens[:-1].long(), rows) if first else rows
        cu_seqlens = torch.searchsorted(positions, self.cu_seqlens, out_int32=True)
        bound = 1 if rows is None else self.max_seqlen
        return dataclasses.replace(self, last=LastRows(positions, cu_seqlens, bound))

    def first_rows(self) -> Tensor:
        """Returns the rows of first tokens in the last layer's output, int64 [B]."""
        return (self.cu_seqlens if self.last is None else self.last.cu_seqlens)[:-1].long()

    def output_rows(self, rows: Tensor) -> Tensor:
        """Converts packed rows, int64 [M], to rows of the last layer's output."""
        return rows if self.last is None else torch.searchsorted(self.last.positions, rows)

    def attend(
        self,
        qkv: Tensor,
        num_heads: int,
        dropout_p: float,
        scale: float | None = None,
        position_bias: ops.PositionBias | None = None,
        window: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        """Computes `varlen_attention` of qkv [T, num_heads + 2 * kv_heads, head_dim]."""
        return ops.varlen_attention(
            qkv,
            self.batch,
            self.max_seqlen,
            num_heads=num_heads,
            window=window,
            position_bias=position_bias,
            dropout_p=dropout_p,
            scale=scale,
        )

    def attend_last(
        self,
        q: Tensor,
        kv: Tensor,
        dropout_p: float,
        scale: float | None = None,
        position_bias: ops.PositionBias | None = None,
    ) -> Tensor:
        """Computes attention of the last layer's q [Q, heads, head_dim] over kv [T, 2, ...]."""
        assert self.last is not None
        places = None
        if position_bias is not None:
            places = _columns(self.cu_seqlens, self.last.positions).int()
        return ops.varlen_cross_attention(
            q,
            kv,
            self.last.cu_seqlens,
            self.cu_seqlens,
            self.last.max_seqlen,
            self.max_seqlen,
            position_bias=position_bias,
            query_positions=places,
            dropout_p=dropout_p,
            scale=scale,
            order=self.batch.order if isinstance(self.batch, VarlenBatch) else None,
        )

    def labelled(self, labels: Tensor) -> tuple[Tensor, Tensor] | None:
        """Returns the packed rows [M] and values [M] of the `labels` [B, S] that are not -100.

        Returns None if a padded position has a label, which only the stock model can predict. A
        compiled model cannot run the stock modules instead, and raises a ValueError.
        """
        flat = labels.reshape(-1)
        if torch.compiler.is_compiling():
            return torch.ops.bert_unpad.hf_labelled(flat, self.indices)
        return _labelled(flat, self.indices)


def refuse_restarts(position_ids: Tensor | None, rows: int) -> None:
    """Checks that a batch of one row without a mask is one sequence.

    Raises:
        ValueError: positions restart, so that the row may hold packed sequences. A compiled model
            raises a RuntimeError.
    """
    if position_ids is None or rows != 1 or torch.jit.is_tracing():
        return
    message = (
        "position_ids: expected positions that rise in the only row, as it has neither "
        "cu_seq_lens_q nor attention_mask; pass cu_seq_lens_q for packed sequences "
        "(DataCollatorWithFlattening(..., return_flash_attn_kwargs=True)), or an attention_mask of "
        "ones for one sequence"
    )
    rises = (position_ids.diff() > 0).all()
    if torch.compiler.is_compiling():
        torch._assert_async(rises, message)
    elif not rises:
        raise ValueError(message)


def _columns(cu_seqlens: Tensor, rows: Tensor) -> Tensor:
    """Returns the index of packed rows in their sequences, int64 like `rows`."""
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


def _unfit(mask: Tensor, reads_first: bool, distances: bool) -> str | None:
    """Returns why packed tokens are not what the stock modules make of a mask, or None."""
    if reads_first and not bool((mask[:, 0] == 1).all()):
        return "the first position, which the model may read, is padding in some sequence"
    if not distances:
        return None
    begins = (mask[:, 1:] > mask[:, :-1]).sum(1) + (mask[:, 0] == 1)
    if bool((begins > 1).any()):
        return "there is padding between tokens, which counts in the model's distances of tokens"
    return None


@torch.library.custom_op("bert_unpad::hf_pack", mutates_args=())
def _pack_op(mask: Tensor, reads_first: bool, distances: bool) -> tuple[Tensor, Tensor]:
    batch = VarlenBatch.from_mask(mask)
    if (reason := _unfit(mask, reads_first, distances)) is not None:
        raise ValueError(
            f"attention_mask: {reason}; pad on the right, or do not compile, as only an uncompiled "
            "model can run the stock modules instead"
        )
    cu_seqlens = batch.cu_seqlens
    return batch.indices, cu_seqlens.clone() if cu_seqlens is batch.cu_seqlens_host else cu_seqlens


@_pack_op.register_fake
def _(mask, reads_first, distances):
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
            "labels: expected -100 where attention_mask is 0, as only an uncompiled model can run "
            "the stock modules instead"
        )
    return found


@_labelled_op.register_fake
def _(labels, indices):
    count = torch.library.get_ctx().new_dynamic_size()
    return (
        labels.new_empty((count,), dtype=torch.int64),
        labels.new_empty((count,)),
    )
