"""Self-attention over packed sequences, and the residual block that ends both halves of a layer.

Queries, keys and values share one weight, queries first: [(heads + 2 * kv_heads) * head_dim,
hidden]. So one GEMM reads the hidden states once, and its output is the buffer that attention
reads, [T, heads + 2 * kv_heads, head_dim].
"""

from torch import Tensor, nn

from bert_unpad import ops
from bert_unpad.batch import QueryRows, VarlenBatch
from bert_unpad.batch.rows import gather_rows
from bert_unpad.nn.config import EncoderConfig
from bert_unpad.nn.norms import dropout_add_norm, make_norm
from bert_unpad.nn.positions import NO_POSITIONS, AttentionPositions
from bert_unpad.nn.relative import DisentangledBias
from bert_unpad.nn.rng import RngKeys
from bert_unpad.nn.stacked_linear import StackedLinear
from bert_unpad.ops.attention import AttentionSchedule
from bert_unpad.ops.delayed_scaling import DelayedScale, LinearScales
from bert_unpad.ops.fp8 import RoundedInput, input_parts


class SelfAttention(nn.Module):
    """Multi-head attention within each sequence, without the output projection."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.num_heads, self.kv_heads = config.num_attention_heads, config.kv_heads
        self.head_dim = config.head_dim
        self.dropout_p = config.attention_probs_dropout_prob
        heads = (self.num_heads, self.kv_heads, self.kv_heads)
        rows = tuple(count * self.head_dim for count in heads)
        self.qkv = StackedLinear(config.hidden_size, rows, bias=config.attention_bias)
        self.scale = config.score_scale
        if config.relative_positions == "disentangled":
            self.relative = DisentangledBias(config)
        self.fp8 = False
        self.scales: LinearScales | None = None
        self.schedule: AttentionSchedule = "list"

    def _project(
        self, x: Tensor | RoundedInput, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns the linear layer of x, and x for the residual; see `ops.linear_residual`."""
        if isinstance(x, Tensor) and not self.fp8:
            return ops.linear_residual(x, weight, bias)
        return ops.fp8_linear(x, weight, bias, self.scales), input_parts(x)[0]

    def forward(
        self,
        x: Tensor | RoundedInput,
        batch: VarlenBatch,
        rng: Tensor | None = None,
        positions: AttentionPositions = NO_POSITIONS,
        distances_rng: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Every token attends to its sequence.

        Args:
            x: hidden states, [T, hidden]; with `fp8` they may be rounded already.
            batch: how x is packed.
            rng: the dropout key, int64 [2]; None draws one.
            positions: what the layer has to know of positions.
            distances_rng: the key of the dropout of embeddings of distances.

        Returns:
            The attention output, [T, heads * head_dim], and x for the residual; see
            `ops.linear_residual`.
        """
        linear = self.qkv
        qkv, residual = self._project(x, linear.weight, linear.bias)
        rotated = self.num_heads + self.kv_heads
        qkv = qkv.view(qkv.shape[0], rotated + self.kv_heads, self.head_dim)
        if (rotary := positions.rotary) is not None:
            qkv = ops.rotary_(
                qkv,
                rotary.tokens,
                heads=rotated,
                theta=rotary.theta,
                position_scale=rotary.scale,
            )
        bias = positions.bias
        if positions.distances is not None:
            q, k = qkv[:, : self.num_heads], qkv[:, self.num_heads : rotated]
            bias = self.relative(*positions.distances, q, k, self.qkv, self.scale, distances_rng)
        out = ops.varlen_attention(
            qkv,
            batch,
            num_heads=self.num_heads,
            window=positions.window,
            position_bias=bias,
            scale=self.scale,
            dropout_p=self.dropout_p if self.training else 0.0,
            rng=rng,
            schedule=self.schedule,
        )
        return out.flatten(1), residual

    def forward_rows(
        self,
        x: Tensor | RoundedInput,
        x_rows: Tensor,
        batch: VarlenBatch,
        rows: QueryRows,
        rng: Tensor | None = None,
        positions: AttentionPositions = NO_POSITIONS,
        distances_rng: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Only the given rows attend to their whole sequence.

        Args:
            x: hidden states of all tokens, [T, hidden]; with `fp8` they may be rounded already.
            x_rows: hidden states of `rows.positions`, [Q, hidden].
            batch: how x is packed.
            rows: how x_rows is packed.
            rng: the dropout key, int64 [2]; None draws one.
            positions: what the layer has to know of positions.
            distances_rng: the key of the dropout of embeddings of distances.

        Returns:
            The attention output, [Q, heads * head_dim], and x_rows for the residual.
        """
        # split, not two slices: its backward joins the two gradients in one pass.
        sizes = [self.num_heads * self.head_dim, 2 * self.kv_heads * self.head_dim]
        q_weight, kv_weight = self.qkv.weight.split(sizes)
        biases = (None, None) if self.qkv.bias is None else self.qkv.bias.split(sizes)
        q, residual = self._project(x_rows, q_weight, biases[0])
        kv, _ = self._project(x, kv_weight, biases[1])
        q = q.view(x_rows.shape[0], self.num_heads, self.head_dim)
        if (rotary := positions.rotary) is not None:
            theta, scale = rotary.theta, rotary.scale
            q = ops.rotary_(q, rotary.rows, heads=self.num_heads, theta=theta, position_scale=scale)
            kv = kv.view(kv.shape[0], 2 * self.kv_heads, self.head_dim)
            kv = ops.rotary_(
                kv, rotary.tokens, heads=self.kv_heads, theta=theta, position_scale=scale
            )
        kv = kv.view(kv.shape[0], 2, self.kv_heads, self.head_dim)
        bias = positions.bias
        if positions.distances is not None:
            k = kv[:, 0]
            bias = self.relative(*positions.distances, q, k, self.qkv, self.scale, distances_rng)
        out = ops.varlen_cross_attention(
            q,
            kv,
            rows.cu_seqlens,
            batch.cu_seqlens,
            rows.max_seqlen,
            batch.max_seqlen,
            window=positions.window,
            position_bias=bias,
            query_positions=positions.rows,
            scale=self.scale,
            dropout_p=self.dropout_p if self.training else 0.0,
            rng=rng,
            order=batch.order,
        )
        return out.flatten(1), residual


class OutputBlock(nn.Module):
    """norm(residual + dropout(dense(x))), the end of the attention and feed-forward halves.

    With norms before each half (`norm_place="pre"`), the norm is the one of the half that follows:
    the sum is the residual of that half, its norm the input. So both kinds of layer end their
    halves with the same operator, and no norm is a pass over memory of its own.

    The caller computes the product with `dense.weight`, because an operator may fuse it with what
    comes before it.
    """

    def __init__(self, config: EncoderConfig, in_features: int, bias: bool, dropout_p: float):
        super().__init__()
        self.dense = nn.Linear(in_features, config.hidden_size, bias=bias)
        self.LayerNorm = make_norm(config, config.hidden_size)
        self.dropout_p = dropout_p
        self.pre_norm = config.norm_place == "pre"

    def forward(
        self,
        x: Tensor,
        residual: Tensor,
        rng: Tensor | None = None,
        scale: DelayedScale | None = None,
    ) -> tuple[Tensor | RoundedInput, Tensor | RoundedInput]:
        """Adds the bias, dropout and the residual, and normalises the sum.

        Args:
            x: the product with `dense.weight`, [rows, hidden].
            residual: the residual of this half of the layer, [rows, hidden].
            rng: the dropout key, int64 [2]; None draws one.
            scale: round the norm too, by the scale of the linear layer that takes it.

        Returns:
            The input and the residual of the half that follows, both [rows, hidden]; the same,
            unless norms come before the halves.
        """
        p = self.dropout_p if self.training else 0.0
        found = dropout_add_norm(
            *(self.LayerNorm, x, residual, self.dense.bias, p, rng),
            return_sum=self.pre_norm,
            scale=scale,
        )
        if isinstance(found, (Tensor, RoundedInput)):
            return found, found
        total, y = found
        return y, total


class AttentionBlock(nn.Module):
    """The attention half of a layer: self-attention, output projection, residual, norm."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.self = SelfAttention(config)
        self.output = OutputBlock(
            config,
            config.num_attention_heads * config.head_dim,
            config.attention_bias,
            config.rate("attention_output_dropout_prob"),
        )
        self.fp8 = False
        self.scales: LinearScales | None = None

    def forward(
        self,
        x: Tensor | RoundedInput,
        residual: Tensor | RoundedInput,
        batch: VarlenBatch,
        rows: QueryRows | None = None,
        rng: RngKeys = (None, None, None),
        positions: AttentionPositions = NO_POSITIONS,
        scale: DelayedScale | None = None,
    ) -> tuple[Tensor | RoundedInput, Tensor | RoundedInput]:
        """Returns input and residual of the feed-forward half, of all tokens or those of `rows`.

        x and `residual` are [T, hidden], the same unless norms come before the halves; the results
        are [T, hidden], or [Q, hidden] with `rows`, the input rounded too if there is a scale. The
        dropout keys are those of attention weights, of the output, and of embeddings of distances.
        """
        if rows is None:
            out, same = self.self(x, batch, rng[0], positions, rng[2])
        else:
            x_rows = gather_rows(input_parts(x)[0], rows.positions)
            out, same = self.self.forward_rows(x, x_rows, batch, rows, rng[0], positions, rng[2])
        if residual is x:
            residual = same
        elif rows is not None:
            residual = gather_rows(input_parts(residual)[0], rows.positions)
        output = self.output
        weight = output.dense.weight
        y = ops.fp8_linear(out, weight, None, self.scales) if self.fp8 else ops.linear(out, weight)
        return output(y, residual, rng[1], scale)
