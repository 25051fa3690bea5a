"""Published methods that work and are tested, but may change: no recipe in `configs/` uses them.

A method is a module or folder that no other one imports. The trainer's tables name it by its import
path, so that only runs that choose a method import it.
"""

from typing import Any

from bert_unpad._import_path import resolve

_HOME = {
    "MERIT": "merit",
    "MTDAO": "mt_dao",
    "GradientFlow": "gradient_flow",
    "PartialSync": "dream_ddp",
    "ZeroOneAdam": "zero_one_adam",
    "gradient_flow_hook": "gradient_flow",
    "partial_sync_hook": "dream_ddp",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return resolve(f"{__name__}.{_HOME[name]}.{name}")
