"""What optimizers share whose update of a parameter depends on sums over all of its elements.

Where parameters are sharded, the operators come in two halves, and the sums of all parameters are
added up over the shards in between, in one allreduce.
"""

from collections.abc import Sequence

from torch import Tensor

from bert_unpad.optim.base import FusedOptimizer
from bert_unpad.optim.parameter_lists import Update, sum_over_shards


class TwoPassOptimizer(FusedOptimizer):
    """Base class of FusedLAMB and FusedStableAdamW."""

    splits_stacked = True
    updates_by = "sums"

    def _update_all(self, updates: Sequence[Update]) -> None:
        self._update_whole([update for update in updates if not update.parameters.shards])
        sharded = [update for update in updates if update.parameters.shards]
        passes = self._first_passes(sharded)
        lists = [update.parameters for update in sharded]
        totals = sum_over_shards(lists, [sums for sums, _ in passes])
        for update, sums, (_, coefficients) in zip(sharded, totals, passes, strict=True):
            self._second_pass(update, sums, coefficients)

    def _update_whole(self, updates: Sequence[Update]) -> None:
        """Updates lists of parameters that are not sharded."""
        raise NotImplementedError

    def _first_passes(self, updates: Sequence[Update]) -> list[tuple[Tensor, Tensor]]:
        """Moves the moments of each list on; returns sums and coefficients, a row a parameter."""
        raise NotImplementedError

    def _second_pass(self, update: Update, sums: Tensor, coefficients: Tensor) -> None:
        """Changes the weights of one list, given sums over all shards."""
        raise NotImplementedError
