"""Whether modules are still what they were when something was derived from them."""

from collections.abc import Collection

from torch import nn


class Snapshot:
    """What decides how a module and all modules within it are computed, but for parameters.

    That is which modules there are, their classes, some of their attributes, and whether any has a
    hook or a forward function of its own, as then only a call of it tells what it computes.
    """

    def __init__(self, module: nn.Module, attributes: Collection[str]) -> None:
        """Notes how things are.

        Args:
            module: a tree of modules.
            attributes: names; their values are compared by ==, where a module has them now.
        """
        self._modules = modules = list(module.modules())
        self._dicts = [m.__dict__ for m in modules]
        self._children = [m._modules for m in modules if m._modules]
        self._hooks = [
            hooks
            for m in modules
            for hooks in (
                *(m._forward_hooks, m._forward_pre_hooks),
                *(m._backward_hooks, m._backward_pre_hooks),
            )
        ]
        self._attributes = [(d, name) for d in self._dicts for name in attributes if name in d]
        self._noted = self._state()

    def holds(self) -> bool:
        """Whether all is as it was."""
        return self._state() == self._noted

    def _state(self) -> tuple[bool, list, list, list]:
        return (
            any(self._hooks) or any("forward" in d for d in self._dicts),
            list(map(type, self._modules)),
            [child for children in self._children for child in children.values()],
            [d[name] for d, name in self._attributes],
        )
