"""`copy.deepcopy` and `pickle` of the package's optimizers, which lose nothing."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist


class CopyableOptimizer(torch.optim.Optimizer):
    """An optimizer whose copies have all of its attributes.

    Those of `torch.optim.Optimizer` have the parameter groups, the state and the defaults only.
    As there, hooks stay with the original. So does what others have put in place of a method, as
    learning rate schedulers do with `step`: it would update the original. A deep copy shares
    process groups with the original; an optimizer that has one cannot be pickled.
    """

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in vars(self).items()
            if not (name.startswith("_optimizer_") or callable(getattr(type(self), name, None)))
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> CopyableOptimizer:
        groups = [value for value in vars(self).values() if isinstance(value, dist.ProcessGroup)]
        memo.update({id(group): group for group in groups})
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied
