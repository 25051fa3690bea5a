"""How fast each rank is: given, or measured while the run trains.

A rank's speed is the work that it does in a second of its own computing: waiting for other ranks
does not count. What a step costs beside its examples makes that smaller for ranks with little work.
So speeds are measured again and again, and settle where all ranks take equally long.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bert_unpad.pretrain.config import ConfigError
from bert_unpad.pretrain.gradients.compute_clock import ComputeClock, Spans
from bert_unpad.pretrain.ranks import Ranks

__all__ = ["RankSpeeds"]

_FIRST, _EVERY = 6, 24  # updates before the first measurement, and between two
_SKIPPED = 2  # updates at the start, which are slower
_TRUST = 0.5  # exponent of a new measurement in the average with the speeds so far


class RankSpeeds:
    """The speeds of all ranks, the same on all of them.

    Args:
        setting: a number > 0 for each rank, in any unit, or "auto" to measure.
        ranks: the processes of the run.
        saved: what was measured before the run was interrupted; used on as many ranks.

    Raises:
        ConfigError: there are not as many numbers as ranks.
    """

    def __init__(
        self, setting: list[float] | Literal["auto"], ranks: Ranks, saved: list[float]
    ) -> None:
        self._ranks = ranks
        self._measures = setting == "auto"
        self.clock = ComputeClock(ranks.device, self._measures)
        """Measures this rank's computing, for `add_update`."""
        self._updates = 0
        self._due = _FIRST
        self._laps: list[tuple[float, Spans]] = []
        if setting == "auto":
            values = saved if len(saved) == ranks.world_size else [1.0] * ranks.world_size
        elif len(setting) != ranks.world_size:
            raise ConfigError(
                "batching.rank_speeds",
                f"expected a number for each of {ranks.world_size} ranks, got {len(setting)}",
            )
        else:
            values = setting
        self.values: NDArray[np.float64] = np.asarray(values, np.float64)
        """float64 [ranks]."""

    def add_update(self, work: float) -> bool:
        """Takes in what the clock has measured of an update; all ranks call it after each.

        Args:
            work: of this rank's examples in that update.

        Returns:
            Whether `values` have changed.
        """
        if not self._measures:
            return False
        spans = self.clock.take()
        self._updates += 1
        if self._updates > _SKIPPED and work > 0:
            self._laps.append((work, spans))
        if self._updates < self._due:
            return False
        first = self._due == _FIRST
        self._due += _EVERY
        rates = [work / self.clock.seconds(spans) for work, spans in self._laps]
        self._laps = []
        measured = np.array(self._ranks.gather(float(np.median(rates)) if rates else 0.0))
        known = measured > 0  # a rank without examples has shown nothing
        if not known.any():
            return False
        trust = 1.0 if first else _TRUST
        before = self.values / self.values[known].mean()
        measured = np.where(known, measured / measured[known].mean(), before)
        values = before ** (1 - trust) * measured**trust
        self.values = values / values.mean()
        return True
