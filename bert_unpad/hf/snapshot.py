"""Whether modules are still what they were when something was derived from them."""

from collections.abc import Collection

from torch import nn


class Snapshot:
    """How a module, and all modules within it, are computed, as far as this can be compared.

    That is: which modules there are, their classes, some of their attributes, and whether any of
    them has a hook or a forward function of its own. Parameters are not part of it.
    """

    def __init__(self, module: nn.Module, attributes: Collection[str]) -> None:
        """Notes how things are.

        Args:
            module: a tree of modules.
            attributes: names; their values are compared by ==, where a module has them now.
        """
        self._modules = list(module.modules())
        self._dicts = [m.__dict__ for m in self._modules]
        self._parents = [d for d in self._dicts if d["_modules"]]
        self._attributes = [(d, name) for d in self._dicts for name in attributes if name in d]
        self._noted = self._state()

    def holds(self, module: nn.Module) -> bool:
        """Whether this is the same module, and all is as it was."""
        return module is self._modules[0] and self._state() == self._noted

    def _state(self) -> tuple[bool, list, list, list]:
        return (
            any(
                d["_forward_hooks"]
                or d["_forward_pre_hooks"]
                or d["_backward_hooks"]
                or d["_backward_pre_hooks"]
                or "forward" in d
                for d in self._dicts
            ),
            list(map(type, self._modules)),
            [child for d in self._parents for child in d["_modules"].values()],
            [d[name] for d, name in self._attributes],
        )
