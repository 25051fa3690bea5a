"""How far a run is: the part of a checkpoint that is no tensor."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Progress:
    """How far a run is; the part of a checkpoint that is no tensor. Counts are over all ranks."""

    step: int = 0
    """Updates made."""
    epoch: int = 0
    """Number of the epoch that the latest update's examples are from."""
    sequences: int = 0
    tokens: int = 0
    """Real tokens trained on."""
    padded: int = 0
    """Tokens that the same sequences would be with padding."""
    flops: float = 0.0
    """Floating-point operations of the model so far, forward and backward."""
    seconds: float = 0.0
    """Spent training."""
    joules: dict[str, float | None] = field(default_factory=dict)
    """Energy of the run so far, by source, see `output.energy`; None: not read all the time."""
    stage: int = 0
    """The stage of growth that the latest update was made in."""
    layers: int | None = None
    """Encoder layers of that stage; None: all that the configuration asks for."""
    optimizer: str | None = None
    """Layout of the optimizer's state, see `update.kinds`; None: adam."""
    target_reached: bool = False
    """Whether evaluation.target_accuracy has ended the run."""
    sampler: dict[str, Any] = field(default_factory=dict)
    """State of the sampler after the latest update."""
    rank_speeds: list[float] = field(default_factory=list)
    """What was measured last with batching.rank_speeds auto, by rank."""
    gradients: dict[str, Any] = field(default_factory=dict)
    """What the next step's gradient depends on, see `GradientSync.state_dict`."""
    window: dict[str, float] = field(default_factory=dict)
    """Sums of the log's current interval."""
    window_seconds: float = 0.0
    """Value of `seconds` at the beginning of the log's current interval."""

    def to_json(self) -> dict[str, Any]:
        """All fields as a JSON object."""
        return dataclasses.asdict(self)

    def add(self, counts: dict[str, float]) -> None:
        """Counts an update's examples."""
        self.sequences += int(counts["sequences"])
        self.tokens += int(counts["tokens"])
        self.padded += int(counts["padded"])
        self.flops += counts["flops"]
