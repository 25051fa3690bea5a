"""The stack of transformer layers, post-LayerNorm as in BERT, on packed tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bert_unpad import ops
from bert_unpad.batch import QueryRows, VarlenBatch
from bert_unpad.nn.attention import BertAttention, BertOutput
from bert_unpad.nn.config import BertConfig
from bert_unpad.nn.rng import RngKeys

__all__ = ["BertEncoder", "BertIntermediate", "BertLayer", "Recompute"]

Recompute = Literal["none", "gelu", "layer"]


class BertIntermediate(nn.Module):
    """The first linear layer of the feed-forward half, and which GELU follows it."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.approximate = config.gelu_approximate


class BertLayer(nn.Module):
    """Attention and feed-forward, each followed by dropout, residual and LayerNorm."""

    RNG_KEYS = 3  # attention probabilities, attention output, feed-forward output

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = BertAttention(config)
        self.intermediate = BertIntermediate(config)
        self.output = BertOutput(config, config.intermediate_size)
        self.fp8 = False

    def forward(
        self,
        x: Tensor,
        batch: VarlenBatch,
        rows: QueryRows | None = None,
        rng: RngKeys = (None, None, None),
        recompute_gelu: bool = False,
    ) -> Tensor:
        """[T, hidden] -> [T, hidden], or [Q, hidden] if only `rows` are asked for.

        `recompute_gelu`: compute the GELU's output again in the backward pass, do not keep it.
        """
        x = self.attention(x, batch, rows, (rng[0], rng[1]))
        y, residual = ops.mlp(
            x,
            self.intermediate.dense.weight,
            self.intermediate.dense.bias,
            self.output.dense.weight,
            approximate=self.intermediate.approximate,
            recompute=recompute_gelu,
            fp8=self.fp8,
        )
        return self.output(y, residual, rng[2])


class BertEncoder(nn.Module):
    """All layers."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(config) for _ in range(config.num_hidden_layers))
        self.recompute = "none"
        self.frozen_layers = 0
        """This many layers from the bottom, and the embeddings below them, run forward only: they
        save nothing for a backward pass. Whoever sets it also clears their `requires_grad`."""
        self.kept: Sequence[bool] | None = None
        """Which layers training runs, by index; the others hand on what they get. None: all."""

    @property
    def fp8(self) -> bool:
        """Whether the linear layers compute in 8 bits, see `ops.fp8_linear`. What is not linear
        stays in the activations' dtype, and so do embeddings and heads."""
        return any(layer.fp8 for layer in self.layer)

    @fp8.setter
    def fp8(self, value: bool) -> None:
        for layer in self.layer:
            layer.fp8 = layer.attention.fp8 = layer.attention.self.fp8 = value

    @property
    def recompute(self) -> Recompute:
        """What training computes again in the backward pass instead of keeping it.

        none: nothing. gelu: the GELU's output of each layer, a quarter of what a layer keeps, for
        one more pass over memory. layer: whole layers, of which only the input is kept, for about a
        third more arithmetic. No bit of a result depends on it.

        Raises:
            ValueError: set to anything else.
        """
        return self._recompute

    @recompute.setter
    def recompute(self, value: Recompute) -> None:
        if value not in get_args(Recompute):
            raise ValueError(f"recompute must be one of {get_args(Recompute)}, got {value!r}")
        self._recompute = value

    def forward(
        self,
        x: Tensor,
        batch: VarlenBatch,
        rows: QueryRows | None = None,
        rng: RngKeys | None = None,
    ) -> Tensor:
        """Runs the layers.

        Args:
            x: [T, hidden].
            batch: the packing of x.
            rows: if given, the last layer computes only these.
            rng: 3 dropout keys for each layer; None lets the operators draw their own.

        Returns:
            [T, hidden], or [Q, hidden] with `rows`.
        """
        count = BertLayer.RNG_KEYS
        if rng is None:
            rng = (None,) * (count * len(self.layer))
        kept = self.kept if self.training and self.kept is not None else [True] * len(self.layer)
        run = [index for index, is_kept in enumerate(kept) if is_kept]
        if not run and rows is not None:
            x = x.index_select(0, rows.positions)
        for index in run:
            layer = self.layer[index]
            arguments = (
                x,
                batch,
                rows if index == run[-1] else None,
                rng[count * index : count * (index + 1)],
                self.recompute == "gelu" and self.training,
            )
            if self.training and index < self.frozen_layers:
                with torch.no_grad():
                    x = layer(*arguments)
                continue
            if self.recompute == "layer" and self.training:
                # All randomness of a layer is in its keys, so there is no state to restore.
                x = checkpoint(layer, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(*arguments)
        return x
