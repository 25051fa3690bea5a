"""The stack of transformer layers on packed tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bert_unpad import ops
from bert_unpad.batch import QueryRows, VarlenBatch
from bert_unpad.nn.attention import AttentionBlock, OutputBlock
from bert_unpad.nn.config import EncoderConfig
from bert_unpad.nn.norms import Norm, make_norm, normalise
from bert_unpad.nn.positions import NO_POSITIONS, AttentionPositions, layer_positions
from bert_unpad.nn.relative import RelativeBias, RelativeEmbeddings
from bert_unpad.nn.rng import RngKeys
from bert_unpad.nn.stacked_linear import StackedLinear
from bert_unpad.ops.attention import AttentionSchedule
from bert_unpad.ops.delayed_scaling import WINDOW, DelayedScale, DelayedScaling
from bert_unpad.ops.feed_forward import MlpOptions, MlpScales
from bert_unpad.ops.fp8 import RoundedInput
from bert_unpad.ops.glu import GluKind

Recompute = Literal["none", "gelu", "layer"]

_GLU_KINDS: dict[str, GluKind] = {
    **{"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"},
    **{"silu": "silu", "relu": "relu"},
}


class Intermediate(nn.Module):
    """The first linear layer of the feed-forward half, and the activation that follows it.

    With a GLU its output has two halves: what the activation takes, and the gate.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.gated = config.feed_forward == "glu"
        rows = [config.intermediate_size] * (2 if self.gated else 1)
        self.dense = StackedLinear(config.hidden_size, rows, bias=config.mlp_bias)
        if self.gated:
            self.kind = _GLU_KINDS[config.hidden_act]
        else:
            self.approximate = config.gelu_approximate


class EncoderLayer(nn.Module):
    """Attention and feed-forward, each with dropout, residual and norm; see `OutputBlock`."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attention = AttentionBlock(config)
        self.intermediate = Intermediate(config)
        self.output = OutputBlock(
            config,
            config.intermediate_size,
            config.mlp_bias,
            config.rate("feed_forward_dropout_prob"),
        )
        self.fp8 = False
        self.scales: MlpScales | None = None

    @property
    def input_scale(self) -> DelayedScale | None:
        """What the layer's input may be rounded by before it gets it; None: not beforehand."""
        scales = self.attention.self.scales
        return scales.input if self.fp8 and scales is not None else None

    def forward(
        self,
        x: Tensor | RoundedInput,
        batch: VarlenBatch,
        rows: QueryRows | None = None,
        rng: RngKeys = (None, None, None),
        recompute_gelu: bool = False,
        residual: Tensor | None = None,
        positions: AttentionPositions = NO_POSITIONS,
        next_scale: DelayedScale | None = None,
    ) -> Tensor | RoundedInput | tuple[Tensor | RoundedInput, Tensor]:
        """Runs the layer.

        Args:
            x: hidden states, [T, hidden]; with norms before the halves, their norm. With `fp8`
                they may be rounded already, by `input_scale`.
            batch: how x is packed.
            rows: if given, compute only these rows of the output.
            rng: dropout keys, int64 [2]; None draws one. Of attention weights, of what both halves
                add, and with disentangled positions of the embeddings of distances.
            recompute_gelu: compute the activation's output again in the backward pass instead of
                keeping it.
            residual: with norms before the halves, the hidden states, [T, hidden].
            positions: what attention has to know of positions.
            next_scale: round the hidden states too, by the next layer's `input_scale`.

        Returns:
            Hidden states, [T, hidden], or [Q, hidden] with `rows`. With norms before the halves,
            those of the next layer's (or the last) norm, and the sums that the norm is of.
        """
        pre_norm = residual is not None
        keys = (*rng[:2], *rng[3:], None)
        scale = self.scales[0].input if self.fp8 and self.scales is not None else None
        x, residual = self.attention(
            x, residual if pre_norm else x, batch, rows, keys, positions, scale
        )
        intermediate, output = self.intermediate, self.output
        first = intermediate.dense
        weights = (first.weight, first.bias, output.dense.weight)
        more: MlpOptions = {"recompute": recompute_gelu, "fp8": self.fp8, "scales": self.scales}
        if intermediate.gated:
            y, same = ops.glu_mlp(x, *weights, kind=intermediate.kind, **more)
        else:
            y, same = ops.mlp(x, *weights, approximate=intermediate.approximate, **more)
        x, residual = output(y, residual if pre_norm else same, rng[2], next_scale)
        return (x, residual) if pre_norm else x


if TYPE_CHECKING:

    class _Layers(nn.ModuleList):
        """PyTorch's list of modules, which knows no type of its items."""

        def __iter__(self) -> Iterator[EncoderLayer]: ...

        def __getitem__(self, index: Any) -> Any: ...


class Encoder(nn.Module):
    """The stack of all transformer layers.

    `layer` holds each layer's weights once. Where layers share their weights, a token passes
    through more layers than that; see `layer_order`. With norms before each half of a layer, every
    layer holds the norms that follow its halves, the last one the stack's final norm, and
    `LayerNorm` is the first layer's norm before attention.
    """

    layer: _Layers
    LayerNorm: Norm

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        order = config.layer_order
        layers = (EncoderLayer(config) for _ in range(max(order) + 1))
        self.layer = nn.ModuleList(layers)  # type: ignore[assignment]
        self._shared_order = None if config.num_hidden_groups is None else order
        self._config = config
        self._pre_norm = config.norm_place == "pre"
        if config.relative_positions == "bias":
            self.relative_attention_bias = RelativeBias(config)
        if config.relative_positions == "disentangled":
            self.rel_embeddings = RelativeEmbeddings(config)
        if config.first_norm:
            self.LayerNorm = make_norm(config, config.hidden_size)
        self.recompute = "none"
        self.attention_schedule = "list"
        self.frozen_layers = 0
        """This many layers from the bottom, and the embeddings below them, run forward only and
        save nothing for a backward pass. Code that sets it must also clear their `requires_grad`.
        """
        self.active_layers: Sequence[bool] | None = None
        """Whether training runs each layer; the others pass their input on. None runs all."""

    @property
    def layer_order(self) -> Sequence[int]:
        """For each layer that a token passes through, its index in `layer`."""
        return range(len(self.layer)) if self._shared_order is None else self._shared_order

    @property
    def fp8(self) -> bool:
        """Whether the linear layers compute in 8 bits; see `ops.fp8_linear`.

        Everything else, embeddings and heads included, computes in the activations' dtype.
        """
        return any(layer.fp8 for layer in self.layer)

    @fp8.setter
    def fp8(self, value: bool) -> None:
        for layer in self.layer:
            layer.fp8 = layer.attention.fp8 = layer.attention.self.fp8 = value

    @property
    def fp8_weights(self) -> list[Tensor]:
        """The weights of the linear layers that compute in 8 bits."""
        weights = []
        for layer in (layer for layer in self.layer if layer.fp8):
            attention = (layer.attention.self.qkv, layer.attention.output.dense)
            feed_forward = (layer.intermediate.dense, layer.output.dense)
            weights += [linear.weight for linear in (*attention, *feed_forward)]
        return weights

    def delay_scaling(
        self, window: int = WINDOW, device: torch.device | None = None
    ) -> DelayedScaling:
        """Gives the inputs of linear layers and the gradients of their outputs delayed scales.

        They are read with `fp8`; see `DelayedScaling`. Call it again after layers have changed.

        Args:
            window: updates whose largest values give a scale.
            device: the model's.

        Returns:
            The scales. Call `update` on them after each update of the weights, and keep their
            `state_dict` with the model's.

        Raises:
            ValueError: the window is not a number above 0.
        """
        scaling = DelayedScaling(4 * len(self.layer), window, device)
        for number, layer in enumerate(self.layer):
            attention, output, first, second = (scaling[4 * number + i] for i in range(4))
            layer.attention.self.scales, layer.attention.scales = attention, output
            layer.scales = first, second
        return scaling

    @property
    def attention_schedule(self) -> AttentionSchedule:
        """How a GPU starts the sequences of a batch: see `schedule` of `ops.varlen_attention`.

        The last layer, where it computes some rows only, starts them as with "list". Where a model
        under `torch.compile` is to use "groups", read `batch.group_sizes` before calling it.

        Raises:
            ValueError: set to anything but "list" and "groups".
        """
        return self._attention_schedule

    @attention_schedule.setter
    def attention_schedule(self, value: AttentionSchedule) -> None:
        if value not in get_args(AttentionSchedule):
            raise ValueError(f"attention_schedule: expected list or groups, got {value!r}")
        self._attention_schedule = value
        for layer in self.layer:
            layer.attention.self.schedule = value

    @property
    def recompute(self) -> Recompute:
        """What the backward pass computes again instead of keeping it from the forward pass.

        - none: nothing.
        - gelu: the GELU's output. Saves a quarter of a layer's memory and costs one more pass over
          that output.
        - layer: the whole layer. Keeps only its input and costs about a third more arithmetic.

        Results have the same bits with each of them.

        Raises:
            ValueError: set to anything else.
        """
        return self._recompute

    @recompute.setter
    def recompute(self, value: Recompute) -> None:
        if value not in get_args(Recompute):
            raise ValueError(
                f"recompute: expected one of {', '.join(get_args(Recompute))}, got {value!r}"
            )
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
            x: hidden states, [T, hidden].
            batch: how x is packed.
            rows: if given, the last layer computes only these rows.
            rng: `keys_per_layer` dropout keys per layer; None lets each operator draw its own.

        Returns:
            Hidden states, [T, hidden], or [Q, hidden] with `rows`.
        """
        count = self._config.keys_per_layer
        order = self.layer_order
        if rng is None:
            rng = (None,) * (count * len(order))
        if self.frozen_layers and self._shared_order is not None:
            raise ValueError(
                f"frozen_layers: expected 0 where layers share weights, got {self.frozen_layers}"
            )
        indices = [index for index in range(len(order)) if self._is_active(index)]
        if not indices and rows is not None:
            x = x.index_select(0, rows.positions)
        recompute = self.recompute if self.training else "none"
        residual, ran = None, -1
        if self._pre_norm:
            residual = x
            x = normalise(self.LayerNorm, x) if self._config.first_norm else x
        bias, distances = self._relative(x.dtype)
        places = layer_positions(self._config, indices, batch, rows, bias, distances)
        layers = [self.layer[order[index]] for index in indices]
        scales = [*(layer.input_scale for layer in layers[1:]), None]
        for index, layer, positions, next_scale in zip(
            indices, layers, places, scales, strict=False
        ):
            if residual is not None and index > ran + 1:
                x = normalise(self._norm_before(index), residual)
            arguments = (
                x,
                batch,
                rows if index == indices[-1] else None,
                rng[count * index : count * (index + 1)],
                recompute == "gelu",
                residual,
                positions,
            )
            if self.training and index < self.frozen_layers:
                with torch.no_grad():
                    found = layer(*arguments)
            elif recompute == "layer":
                # A layer's randomness depends only on its keys, so there is no state to restore.
                # Its input is all that is kept: not in 8 bits too.
                found = checkpoint(layer, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                found = layer(*arguments, next_scale)
            x, residual = found if self._pre_norm else (found, None)
            ran = index
        if residual is not None and ran + 1 < len(order):
            x = normalise(self._norm_before(len(order)), residual)
        return x

    def _norm_before(self, index: int) -> Norm:
        """The norm before the attention of a layer, by its index, or the last of all norms, by the
        number of layers; for norms before the halves.

        The layer below owns it: one operator adds that layer's residual and normalises the sum."""
        return self.layer[self.layer_order[index - 1]].output.LayerNorm  # type: ignore[union-attr]

    def _relative(
        self, dtype: torch.dtype
    ) -> tuple[ops.PositionBias | None, tuple[Tensor, Tensor] | None]:
        """What layers get to know of distances; see `AttentionPositions`."""
        kind = self._config.relative_positions
        bias = self.relative_attention_bias() if kind == "bias" else None
        if kind != "disentangled":
            return bias, None
        return None, (self.rel_embeddings(dtype), self.rel_embeddings.buckets)

    def _is_active(self, index: int) -> bool:
        return not self.training or self.active_layers is None or self.active_layers[index]
