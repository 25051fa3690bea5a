"""Whether modules are still what they were when something was derived from them."""

from collections.abc import Collection, Sequence

from torch import nn

from bert_unpad.hf.plain_modules import hooked


class Snapshot:
    """How some modules, and all modules within them, are computed, as far as this can be compared.

    That is: which modules there are, their classes, some of their attributes, and whether any of
    them has a hook or a forward function of its own. Parameters are not part of it.
    """

    def __init__(self, roots: Sequence[nn.Module], attributes: Collection[str]) -> None:
        """Notes how things are.

        Args:
            roots: trees of modules.
            attributes: names; their values are compared by ==, where a module has them now.
        """
        self._roots = list(roots)
        self._modules = [module for root in roots for module in root.modules()]
        self._dicts = [m.__dict__ for m in self._modules]
        self._parents = [d for d in self._dicts if d["_modules"]]
        self._attributes = [(d, name) for d in self._dicts for name in attributes if name in d]
        self._noted = self._state()

    @property
    def hooked(self) -> bool:
        """Whether one of the modules had a hook or a forward function of its own."""
        return self._noted[0]

    def holds(self, roots: Sequence[nn.Module]) -> bool:
        """Whether these are the same modules, and all is as it was."""
        return self._roots == list(roots) and self._state() == self._noted

    def _state(self) -> tuple[bool, list, list, list]:
        return (
            any(map(hooked, self._dicts)),
            list(map(type, self._modules)),
            [child for d in self._parents for child in d["_modules"].values()],
            [d[name] for d, name in self._attributes],
        )
