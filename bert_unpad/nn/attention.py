"""Self-attention over packed sequences, and the residual block that ends both halves of a layer.

Queries, keys and values share one weight [3 * hidden, hidden] (queries first). So one GEMM reads
the hidden states once, and its output is the [T, 3, heads, head_dim] buffer that attention reads.
"""

from __future__ import annotations

from torch import Tensor, nn

from bert_unpad import ops
from bert_unpad.batch import QueryRows, VarlenBatch
from bert_unpad.batch.rows import gather_rows
from bert_unpad.nn.config import EncoderConfig
from bert_unpad.ops.attention import AttentionSchedule


class SelfAttention(nn.Module):
    """Multi-head attention within each sequence, without the output projection."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.head_dim = config.head_dim
        self.dropout_p = config.attention_probs_dropout_prob
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.fp8 = False
        self.schedule: AttentionSchedule = "list"

    def _project(self, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the linear layer of x, and x for the residual; see `ops.linear_residual`."""
        if self.fp8:
            return ops.fp8_linear(x, weight, bias), x
        return ops.linear_residual(x, weight, bias)

    def forward(
        self, x: Tensor, batch: VarlenBatch, rng: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Every token attends to its sequence.

        Args:
            x: hidden states, [T, hidden].
            batch: how x is packed.
            rng: the dropout key, int64 [2]; None draws one.

        Returns:
            The attention output, [T, hidden], and x for the residual; see `ops.linear_residual`.
        """
        qkv, residual = self._project(x, self.qkv.weight, self.qkv.bias)
        out = ops.varlen_attention(
            qkv.view(x.shape[0], 3, self.num_heads, self.head_dim),
            batch,
            dropout_p=self.dropout_p if self.training else 0.0,
            rng=rng,
            schedule=self.schedule,
        )
        return out.flatten(1), residual

    def forward_rows(
        self,
        x: Tensor,
        x_rows: Tensor,
        batch: VarlenBatch,
        rows: QueryRows,
        rng: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Only the given rows attend to their whole sequence.

        Args:
            x: hidden states of all tokens, [T, hidden].
            x_rows: hidden states of `rows.positions`, [Q, hidden].
            batch: how x is packed.
            rows: how x_rows is packed.
            rng: the dropout key, int64 [2]; None draws one.

        Returns:
            The attention output, [Q, hidden], and x_rows for the residual.
        """
        # split, not two slices: its backward joins the two gradients in one pass.
        hidden = x.shape[1]
        q_weight, kv_weight = self.qkv.weight.split([hidden, 2 * hidden])
        q_bias, kv_bias = self.qkv.bias.split([hidden, 2 * hidden])
        q, residual = self._project(x_rows, q_weight, q_bias)
        kv, _ = self._project(x, kv_weight, kv_bias)
        out = ops.varlen_cross_attention(
            q.view(x_rows.shape[0], self.num_heads, self.head_dim),
            kv.view(x.shape[0], 2, self.num_heads, self.head_dim),
            rows.cu_seqlens,
            batch.cu_seqlens,
            rows.max_seqlen,
            batch.max_seqlen,
            dropout_p=self.dropout_p if self.training else 0.0,
            rng=rng,
            order=batch.order,
        )
        return out.flatten(1), residual


class OutputBlock(nn.Module):
    """LayerNorm(residual + dropout(dense(x))), the end of the attention and feed-forward halves.

    The caller computes the product with `dense.weight`, because an operator may fuse it with what
    comes before it.
    """

    def __init__(self, config: EncoderConfig, in_features: int, dropout_p: float) -> None:
        super().__init__()
        self.dense = nn.Linear(in_features, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout_p = dropout_p

    def forward(self, x: Tensor, residual: Tensor, rng: Tensor | None = None) -> Tensor:
        """Adds the bias, dropout and the residual, and normalises the sum.

        Args:
            x: the product with `dense.weight`, [rows, hidden].
            residual: the input of this half of the layer, [rows, hidden].
            rng: the dropout key, int64 [2]; None draws one.

        Returns:
            The output of this half of the layer, [rows, hidden].
        """
        return ops.dropout_add_layer_norm(
            x,
            residual,
            self.LayerNorm.weight,
            self.LayerNorm.bias,
            p=self.dropout_p if self.training else 0.0,
            eps=self.LayerNorm.eps,
            x_bias=self.dense.bias,
            rng=rng,
        )


class AttentionBlock(nn.Module):
    """The attention half of a layer: self-attention, output projection, residual, LayerNorm."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.self = SelfAttention(config)
        self.output = OutputBlock(
            config, config.hidden_size, config.rate("attention_output_dropout_prob")
        )
        self.fp8 = False

    def forward(
        self,
        x: Tensor,
        batch: VarlenBatch,
        rows: QueryRows | None = None,
        rng: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> Tensor:
        """Returns the new hidden states, [T, hidden], or only those of `rows`, [Q, hidden]."""
        if rows is None:
            out, residual = self.self(x, batch, rng[0])
        else:
            x_rows = gather_rows(x, rows.positions)
            out, residual = self.self.forward_rows(x, x_rows, batch, rows, rng[0])
        linear = ops.fp8_linear if self.fp8 else ops.linear
        return self.output(linear(out, self.output.dense.weight), residual, rng[1])
