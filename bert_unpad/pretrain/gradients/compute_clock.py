"""Measures how long a rank computes in an update, without what it waits for other ranks."""

import time
from itertools import islice

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

Moment = float | torch.cuda.Event
Spans = list[tuple[Moment, Moment]]
"""Begin and end of spans of time."""

_WATCHED = 4  # parameters: the first ones of a model get their gradients last


def span_seconds(spans: Spans) -> float:
    """Length of spans together; waits until the device has passed them."""
    total = 0.0
    for begin, end in spans:
        if isinstance(begin, float) and isinstance(end, float):
            total += end - begin
            continue
        assert isinstance(begin, torch.cuda.Event)
        assert isinstance(end, torch.cuda.Event)
        end.synchronize()
        total += begin.elapsed_time(end) / 1e3
    return total


class ComputeClock:
    """Adds up spans of computing, by the host's clock or by events on the CUDA stream.

    Args:
        device: which computes.
        enabled: whether to measure; if not, all methods do nothing.
    """

    def __init__(self, device: torch.device, enabled: bool = True) -> None:
        self._cuda = device.type == "cuda"
        self._enabled = enabled
        self._spans: Spans = []
        self._begin: Moment | None = None
        self._gradients: Moment | None = None
        self._handles: list[RemovableHandle] = []

    def watch(self, model: nn.Module) -> None:
        """Lets `stop` know when the gradients of a model are complete, instead of another's."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._enabled:
            trained = (p for p in model.parameters() if p.requires_grad)
            for parameter in islice(trained, _WATCHED):
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._mark))

    def _mark(self, _: Tensor) -> None:
        self._gradients = self._now()

    def start(self) -> None:
        """Begins a span; without effect in one."""
        if self._enabled and self._begin is None:
            self._begin, self._gradients = self._now(), None

    def stop(self, at_gradients: bool = False) -> None:
        """Ends the span; without effect outside of one.

        Args:
            at_gradients: it has ended when the gradients were complete, if they are.
        """
        if self._begin is not None:
            marked = self._gradients if at_gradients else None
            self._spans.append((self._begin, self._now() if marked is None else marked))
            self._begin = None

    def take(self) -> Spans:
        """The spans since the last call, for `span_seconds`."""
        spans, self._spans = self._spans, []
        return spans

    def _now(self) -> Moment:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
