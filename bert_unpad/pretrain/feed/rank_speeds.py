"""How fast each rank is: given, or measured while the run trains.

A rank's speed is the work that it does in a second of its own computing: waiting for the sync of
gradients does not count. What a step costs beside its examples makes that smaller for ranks with
little work. So speeds are measured again and again, and settle where all ranks take equally long.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from bert_unpad.pretrain.config import ConfigError
from bert_unpad.pretrain.gradients.compute_clock import Spans, span_seconds
from bert_unpad.pretrain.ranks import Ranks

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
        self._updates = 0
        self._due = _FIRST
        self._laps: list[tuple[float, Spans]] = []
        self._follows = setting == "auto" and len(saved) == ranks.world_size
        if setting == "auto":
            values = saved if self._follows else [1.0] * ranks.world_size
        elif len(setting) != ranks.world_size:
            raise ConfigError(
                "batching.rank_speeds",
                f"expected a number for each of {ranks.world_size} ranks, got {len(setting)}",
            )
        else:
            values = setting
        self.values: NDArray[np.float64] = np.asarray(values, np.float64)
        """float64 [ranks]."""

    def add_update(self, work: float, spans: Spans) -> bool:
        """Takes in what this rank's clock has measured of an update; all call it after each.

        Args:
            work: of this rank's examples in that update.
            spans: in which it computed.

        Returns:
            Whether `values` have changed.
        """
        if not self._measures:
            return False
        self._updates += 1
        if self._updates > _SKIPPED and work > 0:
            self._laps.append((work, spans))
        if self._updates < self._due:
            return False
        self._due += _EVERY
        rates = [work / span_seconds(spans) for work, spans in self._laps]
        self._laps = []
        measured = np.array(self._ranks.gather(float(np.median(rates)) if rates else 0.0))
        known = measured > 0
        if not known.any():
            return False
        # A rank without examples has shown nothing. It counts as one of mean speed, or it would
        # never get an example again.
        measured = np.where(known, measured / measured[known].mean(), 1.0)
        trust = _TRUST if self._follows else 1.0  # the first measurement counts fully
        self._follows = True
        values = self.values ** (1 - trust) * measured**trust
        # In steps of 1 %: dealing is faster where ranks have few different speeds.
        values = 1.01 ** np.round(np.log(values / values.mean()) / np.log(1.01))
        self.values = self._of_first(values)
        return True

    def _of_first(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Rank 0's values, on all ranks: powers may differ in the last bit between processors."""
        mine = values if self._ranks.is_first else np.zeros_like(values)
        return self._ranks.sum(torch.from_numpy(mine).to(self._ranks.device)).cpu().numpy()
