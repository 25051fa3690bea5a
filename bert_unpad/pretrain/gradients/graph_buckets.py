"""Buckets of gradients that travel while a CUDA graph still runs the backward pass.

A graph replays no hooks, so DDP cannot know within it when a gradient is ready. Here each unit of
the model (the heads, each layer from the top down, the embeddings) has an event. Hooks on the
gradients of what goes into a layer record it: when autograd has come that far, all gradients above
are there. While a pass is captured, that makes the record a node of the graph (an external event,
`torch.cuda.Event(external=True)`), so each replay records it again. After the launch of the last
pass of a step, a second stream waits for the events one after another, and clips and averages the
buckets, beside the rest of the pass.

Gradients lie in the buckets from the beginning, and stay there.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bert_unpad.distributed import BucketClip
from bert_unpad.distributed.allreduce import Allreduce
from bert_unpad.nn import EncoderForPreTraining

_DEFAULT_MB = 25.0  # as DDP's buckets
_ALIGN = 128  # bytes, so that every gradient begins where vector instructions can load


def units(model: EncoderForPreTraining) -> list[list[nn.Parameter]]:
    """The parameters that need gradients, in groups that a backward pass completes one by one.

    The heads, the layers from the top down, and the embeddings, which the decoder shares. Layers
    that share weights are complete with the embeddings, and so is what all layers use.
    """
    bert, layers = model.bert, _layers(model)
    below = [list(layer.parameters()) for layer in layers]
    above = {p for unit in below for p in unit}
    rest = [p for p in bert.encoder.parameters() if p not in above]  # of all layers
    below.append([*rest, *bert.embeddings.parameters()])
    known = {p for unit in below for p in unit}
    found = [[p for p in model.parameters() if p not in known], *below]
    return [[p for p in reversed(unit) if p.requires_grad] for unit in found]


def _layers(model: EncoderForPreTraining) -> list[nn.Module]:
    """The layers from the top down, where each has its own weights."""
    return [] if model.config.num_hidden_groups else [*reversed(model.bert.encoder.layer)]


@dataclass(frozen=True)
class GraphBucket:
    """Gradients that travel together; as `torch.distributed.GradBucket` to those who send it."""

    number: int
    of: int
    flat: Tensor
    """The gradients, each from an aligned place on, and zeros between them."""
    ready: int
    """The unit whose end completes it."""

    def buffer(self) -> Tensor:
        """See `flat`."""
        return self.flat

    def index(self) -> int:
        """The bucket's number, from 0."""
        return self.number

    def is_last(self) -> bool:
        """Whether it is the last one."""
        return self.number == self.of - 1


class GraphBuckets:
    """Puts the gradients of a model into buckets, and sends these after the launch of a pass.

    Args:
        model: on its device, in training mode; its `.grad` become parts of the buckets and must
            stay: clear them with `zero_grad(set_to_none=False)`.
        limit_mb: size limit of a bucket in MiB, unless a single parameter is larger; None: 25.
    """

    _clip: BucketClip  # from `attach` on

    def __init__(self, model: EncoderForPreTraining, limit_mb: float | None = None) -> None:
        self._device = model.word_embeddings.device
        limit = int((limit_mb or _DEFAULT_MB) * 2**20)
        self.buckets, self._gaps = _fill(units(model), limit)
        self._last = 1 + len(_layers(model))
        self._marked: set[int] = set()
        self._sent: list[torch.futures.Future[Tensor]] = []
        self._events: list[torch.cuda.Event] = []
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._events = [torch.cuda.Event(external=True) for _ in range(self._last)]
            self._stream = torch.cuda.Stream(self._device)
        self._watch(model)

    def attach(self, clip: BucketClip, allreduce: Allreduce | None) -> None:
        """Sets what clips and averages buckets.

        Args:
            clip: not attached to anything yet.
            allreduce: sums over all ranks; None: `torch.distributed.all_reduce`.
        """
        sizes = [bucket.flat.numel() for bucket in self.buckets]
        self._clip = clip.attach_buckets(sizes, allreduce=allreduce)

    def send(self) -> None:
        """Starts to clip and average all buckets, once the last pass of a step is launched.

        On a GPU neither the host nor the current stream waits. On a CPU the pass is over, and
        averages overlap with the clipping of later buckets.
        """
        events = self._events
        if self._stream is not None:  # the last unit ends with the pass
            events = [*events, torch.cuda.current_stream(self._device).record_event()]
        with self._beside():
            for bucket in self.buckets:
                if self._stream is not None:
                    self._stream.wait_event(events[bucket.ready])
                self._sent.append(self._clip.sync(bucket))

    def wait(self) -> None:
        """Lets the current stream (on a CPU the host) wait until `.grad` holds the averages."""
        for future in self._sent:
            future.wait()
        self._sent.clear()
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        if self._gaps:
            torch._foreach_zero_(self._gaps)  # NaN after an overflow, as the rest of the bucket

    def _beside(self) -> AbstractContextManager:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _watch(self, model: EncoderForPreTraining) -> None:
        """Registers the hooks that mark the end of each unit but the embeddings'."""
        encoder = model.bert.encoder
        encoder.register_forward_pre_hook(lambda module, inputs: self._marked.clear())
        encoder.register_forward_hook(lambda module, inputs, output: self._mark_at(output, 0))
        for unit, layer in enumerate(_layers(model), start=1):
            layer.register_forward_pre_hook(
                lambda module, inputs, unit=unit: self._mark_at(inputs[0], unit)
            )

    def _mark_at(self, hidden: Tensor, unit: int) -> None:
        """Marks the end of a unit when the gradient of these hidden states is there."""
        if hidden.requires_grad and torch.is_grad_enabled():
            hidden.register_hook(lambda gradient: self._mark(unit))

    def _mark(self, unit: int) -> None:
        if unit in self._marked:  # a layer that is computed again registers its hook again
            return
        self._marked.add(unit)
        self._record(unit)

    def _record(self, unit: int) -> None:
        if self._events:
            self._events[unit].record(torch.cuda.current_stream(self._device))


def _fill(parts: list[list[nn.Parameter]], limit: int) -> tuple[list[GraphBucket], list[Tensor]]:
    """Fills buckets with the gradients of units, in order, up to a number of bytes.

    Returns:
        The buckets, in the order in which they are complete, and what is between gradients.
    """
    members: list[list[tuple[nn.Parameter, int]]] = []
    sizes: list[int] = []
    ready: list[int] = []
    for unit, parameters in enumerate(parts):
        for parameter in parameters:
            step = _ALIGN // parameter.element_size()
            numel = -(-parameter.numel() // step) * step
            if not sizes or (sizes[-1] + numel) * parameter.element_size() > limit:
                members.append([])
                sizes.append(0)
                ready.append(unit)
            members[-1].append((parameter, sizes[-1]))
            sizes[-1] += numel
            ready[-1] = unit
    buckets, gaps = [], []
    for number, (held, size) in enumerate(zip(members, sizes, strict=True)):
        flat = torch.zeros(size, dtype=held[0][0].dtype, device=held[0][0].device)
        ends = [start for _, start in held[1:]] + [size]
        for (parameter, start), end in zip(held, ends, strict=True):
            place, gap = flat[start:end].split([parameter.numel(), end - start - parameter.numel()])
            parameter.grad = place.view_as(parameter)
            gaps += [gap] if gap.numel() else []
        buckets.append(GraphBucket(number, len(members), flat, ready[number]))
    return buckets, gaps
