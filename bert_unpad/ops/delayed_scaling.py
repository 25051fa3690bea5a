"""Scales of 8-bit matrices from the largest values of earlier updates: one pass rounds a matrix.

The rule is that of Transformer Engine's recipe `DelayedScaling` with its defaults (documented at
docs.nvidia.com/deeplearning/transformer-engine: margin 0, `amax_compute_algo` "max"). After each
update a scale becomes the largest value of the last `window` updates, over all ranks, divided by
the format's largest number. It is 1 at first, and stays where no value has been above 0. What is
too large for its scale becomes the format's largest number. NaN does not count, nor does an update
in which a value is infinite.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

WINDOW = 1024
"""Transformer Engine's default, in updates."""
# Blocks of a kernel at most, each of which notes its largest value (csrc/cuda/fp8_result.h).
_BLOCKS = 1024
# cuBLASLt multiplies with a scale that lies at a multiple of 16 bytes.
_SCALE_FLOATS = 4


class DelayedScale(NamedTuple):
    """What a kernel that rounds a matrix reads and writes."""

    scale: Tensor
    """float32 [], what the 8-bit numbers are to be multiplied with."""
    largest: Tensor | None
    """float32 [1024], whose largest is that of this update; None: not noted."""


class LinearScales(NamedTuple):
    """The delayed scales of a linear layer."""

    input: DelayedScale
    """The scale of its input, in E4M3."""
    gradient: DelayedScale
    """The scale of the gradient of its output, in E5M2."""

    def of_this_pass(self) -> LinearScales:
        """The same; without noting largest values where no gradients are computed, as in an
        evaluation."""
        if torch.is_grad_enabled():
            return self
        return LinearScales(*(each._replace(largest=None) for each in self))


class DelayedScaling:
    """The scales of several linear layers.

    Args:
        layers: how many.
        window: updates whose largest values count.
        device: where the layers are.

    Raises:
        ValueError: the window is not a number above 0.
    """

    def __init__(
        self, layers: int, window: int = WINDOW, device: torch.device | None = None
    ) -> None:
        if window < 1:
            raise ValueError(f"window: expected a number >= 1, got {window!r}")
        limits = [torch.finfo(dtype).max for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)]
        self._limits = torch.tensor(limits * layers, device=device)
        self._history = torch.zeros(window, 2 * layers, device=device)  # the newest first
        self._scales = torch.ones(2 * layers, _SCALE_FLOATS, device=device)[:, 0]
        self._largest = torch.zeros(2 * layers, _BLOCKS, device=device)

    def __getitem__(self, layer: int) -> LinearScales:
        numbers = (2 * layer, 2 * layer + 1)
        return LinearScales(*(DelayedScale(self._scales[n], self._largest[n]) for n in numbers))

    @torch.no_grad()
    def update(self, group: dist.ProcessGroup | None = None) -> None:
        """Makes the scales of the next update; the device's host does not wait.

        Args:
            group: of ranks that have the same scales, all of which must call it; None: this alone.
        """
        newest = self._largest.amax(1)
        if group is not None:
            dist.all_reduce(newest, dist.ReduceOp.MAX, group=group)
        newest = newest.where(newest.isfinite(), 0.0)
        self._history = torch.cat([newest[None], self._history[:-1]])
        largest = self._history.amax(0)
        # Not so small that its reciprocal is infinite.
        scales = (largest / self._limits).clamp(min=torch.finfo(torch.float32).tiny)
        self._scales.copy_(scales.where(largest > 0, self._scales))
        self._largest.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Scales and history as JSON, without entries that a newer one is not below."""
        history = self._history.cpu()
        newer = torch.cat([torch.zeros(1, history.shape[1]), history.cummax(0).values[:-1]])
        places = (history > newer).nonzero().tolist()
        entries = [[age, number, history[age, number].item()] for age, number in places]
        return {"scales": self._scales.tolist(), "history": entries}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from `state_dict`, also of another window or of fewer or more layers."""
        window, count = self._history.shape
        history = torch.zeros(window, count)
        for age, number, value in state["history"]:
            if age < window and number < count:
                history[age, number] = value
        self._history.copy_(history)
        scales = torch.tensor(state["scales"][:count])
        self._scales[: len(scales)].copy_(scales)
