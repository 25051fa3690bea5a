"""Is a tensor a DTensor, or a module FSDP2's? Asked without importing either.

Their modules take a second to import, which every process and every `--help` would pay. Where
nobody has imported them, nothing is of their types.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether `value` is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def is_fsdp_module(value: object) -> TypeGuard[FSDPModule]:
    """Whether `fully_shard` was called on `value`."""
    module = sys.modules.get("torch.distributed.fsdp")
    return module is not None and isinstance(value, module.FSDPModule)
