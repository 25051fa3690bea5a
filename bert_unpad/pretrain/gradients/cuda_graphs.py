"""Forward and backward passes as CUDA graphs: one launch a pass instead of hundreds.

Batches come padded to a few shapes (`bert_unpad.batch.graph_shapes`). The first batch of each shape
runs a few times as usual, on its own stream, and is then captured, whole: forward pass, loss,
backward pass into `.grad`. From then on a pass copies its inputs into the captured buffers and
replays. All that differs from pass to pass is in buffers: the batch, the loss's factors, and the
dropout keys, which are drawn outside as the model itself would draw them. Weights that the
optimizer also keeps rounded are read there. Attention takes part without changes: its launches
follow from the shape's sizes and bounds, and lengths and order are read on the device.

After PyTorch's rules (docs.pytorch.org, "CUDA semantics", CUDA graphs): warm-up and
capture share one stream, all captures one memory pool; gradients lie outside of it and keep their
place; autocast caches no casts.
"""

import dataclasses
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from bert_unpad.batch import PackedInputs
from bert_unpad.batch.tensor_fields import map_tensors, tensor_fields
from bert_unpad.batch.varlen import DEVICE_TENSORS
from bert_unpad.nn import EncoderForPreTraining, PreTrainingOutput
from bert_unpad.ops.matmul import InPlaceGradients, takes_product
from bert_unpad.ops.rounded_weights import WeightCopy, copies_of
from bert_unpad.pretrain.config import ConfigError, PretrainConfig
from bert_unpad.pretrain.config.limits import GRAPHS_ON_RANKS
from bert_unpad.pretrain.ranks import Ranks

# Passes before a capture: libraries load kernels, allocate workspaces and choose algorithms in the
# first; PyTorch's own recipes take three.
_WARMUP = 3


def check_graphs(config: PretrainConfig, ranks: Ranks) -> None:
    """Checks that a run with `cuda_graphs` can have them.

    Raises:
        ConfigError: see its message.
    """
    if not config.cuda_graphs:
        return
    if ranks.device.type != "cuda":
        raise ConfigError(
            "cuda_graphs", f"expected false with device {ranks.device.type}, got true"
        )
    for limit in GRAPHS_ON_RANKS if ranks.world_size > 1 else ():
        limit.check(config)


def sizes(inputs: PackedInputs) -> tuple[int, ...]:
    """What a captured pass takes for granted of its inputs."""
    batch, rows = inputs.batch, inputs.query_rows
    bounds = (batch.total, batch.max_seqlen, batch.seqlen, rows.max_seqlen)
    return (*bounds, *(tensor.shape[0] for tensor in _tensors(inputs)))


class StaticPass:
    """One forward and backward pass whose inputs are buffers that keep their place.

    Args:
        model: in training mode.
        autocast: context of the forward pass.
        inputs: of the sizes that the buffers will have; copied.
        rng_keys: of the shape that the buffer will have, not copied; None for a model without
            dropout.
    """

    def __init__(
        self,
        model: EncoderForPreTraining,
        autocast: AbstractContextManager,
        inputs: PackedInputs,
        rng_keys: Tensor | None,
    ) -> None:
        device = model.word_embeddings.device
        self._model = model
        self._autocast = autocast
        self._inputs = _own_copy(inputs, device)
        self._sizes = sizes(inputs)
        self._scale = torch.zeros(2, device=device)
        self._in_products: list[Tensor] = []  # weights whose gradients the last run added so
        self._rng_keys = None if rng_keys is None else torch.zeros_like(rng_keys)

    def load(self, inputs: PackedInputs, rng_keys: Tensor | None, scale: Tensor) -> None:
        """Copies what the next pass works on; the host does not wait.

        Args:
            inputs: on the host (in page-locked memory for a GPU) or the device.
            rng_keys: int64 [keys, 2], from `model.bert.draw_rng_keys`; None without dropout.
            scale: float32 [2], the factors of the two losses.

        Raises:
            ValueError: the inputs have other sizes, or dropout was switched on or off.
        """
        if sizes(inputs) != self._sizes:
            raise ValueError(f"inputs: expected sizes {self._sizes}, got {sizes(inputs)}")
        if (rng_keys is None) != (self._rng_keys is None):
            expected, got = ("None", "keys") if self._rng_keys is None else ("keys", "None")
            raise ValueError(f"rng_keys: expected {expected}, as when the pass was made, got {got}")
        for mine, given in zip(_tensors(self._inputs), _tensors(inputs), strict=True):
            mine.copy_(given, non_blocking=True)
        if rng_keys is not None and self._rng_keys is not None:
            self._rng_keys.copy_(rng_keys)
        self._scale.copy_(scale)

    def run(self, first: bool = False) -> PreTrainingOutput:
        """Adds the gradient of the scaled losses to `.grad`; returns the sums, detached.

        Args:
            first: of an update's passes; what `.grad` holds is forgotten. Products that may add to
                it (`ops.accumulate_in_place`) write it instead, if an earlier run has shown which.
        """
        written = [w for w in self._in_products if takes_product(w)] if first else []
        with InPlaceGradients(written) as products:
            with self._autocast:
                outputs = self._model(self._inputs, self._rng_keys)
            if first:  # not before the forward pass, beside which an update may still read them
                self._zero_all_but(written)
            loss = outputs.mlm_loss_sum * self._scale[0] + outputs.nsp_loss_sum * self._scale[1]
            loss.backward()
        self._in_products = products.weights
        return PreTrainingOutput(*(value.detach() for value in outputs))

    def _zero_all_but(self, written: list[Tensor]) -> None:
        known = {id(weight) for weight in written}
        others = [p.grad for p in self._model.parameters() if id(p) not in known]
        if others := [grad for grad in others if grad is not None]:
            torch._foreach_zero_(others)


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    static: StaticPass
    outputs: PreTrainingOutput
    rounded: list[tuple[Tensor, WeightCopy]]  # what it reads in place of weights


class GraphRunner:
    """Runs passes of a model by replaying graphs; captures one where sizes are new.

    Every parameter that requires a gradient gets a `.grad`, if it has none, which must stay: do not
    set it to None. When sizes are new, no autograd graph may be alive that
    ends at the parameters: its ends belong to the stream that it was made on, and cannot be
    captured.

    Args:
        model: on a GPU, in training mode, not in DDP, not compiled.
        autocast: context of the forward pass, with `cache_enabled=False`.

    Raises:
        ValueError: the model is not on a GPU.
    """

    def __init__(self, model: EncoderForPreTraining, autocast: AbstractContextManager) -> None:
        self._device = model.word_embeddings.device
        if self._device.type != "cuda":
            raise ValueError(f"model: expected one on a GPU, got one on {self._device}")
        self._model = model
        self._autocast = autocast
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._gradients = [parameter.grad for parameter in self._parameters]
        self._stream = torch.cuda.Stream(self._device)
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[tuple[int, ...], _Captured] = {}  # by sizes, and whether `first`

    @property
    def graphs(self) -> int:
        """Graphs captured so far."""
        return len(self._captured)

    def __call__(
        self, inputs: PackedInputs, scale: Tensor, first: bool = False
    ) -> PreTrainingOutput:
        """Adds a batch's gradient to `.grad`.

        Args:
            inputs: padded to a graph shape, in page-locked memory or on the device.
            scale: float32 [2] on the device, the factors of the two losses.
            first: write `.grad` instead, as the first pass of an update: nothing has to set it to
                zero before. A graph of its own.

        Returns:
            The model's sums, which the next pass of these sizes overwrites.

        Raises:
            RuntimeError: a parameter's `.grad` is not the one that the graphs write.
        """
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            if parameter.grad is not gradient:
                raise RuntimeError(
                    "a parameter's .grad was replaced, but captured passes write into the first "
                    "one: clear gradients with zero_grad(set_to_none=False), or not at all"
                )
        keys = self._model.bert.draw_rng_keys(self._device)
        key = (*sizes(inputs), first)
        captured = self._captured.get(key)
        if captured is None:
            captured = self._captured[key] = self._capture(inputs, keys, scale, first)
        for weight, copy in captured.rounded:
            copy.renew(weight)
        captured.static.load(inputs, keys, scale)
        captured.graph.replay()
        return captured.outputs

    def _capture(
        self, inputs: PackedInputs, keys: Tensor | None, scale: Tensor, first: bool
    ) -> _Captured:
        rounded = copies_of(self._parameters)
        for weight, copy in rounded:
            copy.renew(weight)
        static = StaticPass(self._model, self._autocast, inputs, keys)
        static.load(inputs, keys, scale)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            # Into gradients that are thrown away.
            for parameter in self._parameters:
                parameter.grad = None
            for _ in range(_WARMUP):
                static.run()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: the thread that prepares batches allocates page-locked memory meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            outputs = static.run(first)
        return _Captured(graph, static, outputs, rounded)


def _tensors(inputs: PackedInputs) -> list[Tensor]:
    """All tensors that are on the data's device."""
    batch, rows = inputs.batch, inputs.query_rows
    return [
        *(getattr(batch, name) for name in DEVICE_TENSORS),
        *(getattr(rows, name) for name in tensor_fields(rows)),
        *(getattr(inputs, name) for name in tensor_fields(inputs)),
    ]


def _own_copy(inputs: PackedInputs, device: torch.device) -> PackedInputs:
    def copy(tensor: Tensor) -> Tensor:
        return tensor.to(device, copy=True)

    copied = map_tensors(inputs, tensor_fields(inputs), copy)
    return dataclasses.replace(
        copied,
        batch=map_tensors(inputs.batch, DEVICE_TENSORS, copy),
        query_rows=map_tensors(inputs.query_rows, tensor_fields(inputs.query_rows), copy),
    )
