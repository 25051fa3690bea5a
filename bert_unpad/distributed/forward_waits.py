"""Which module's forward pass has to wait for which parameters.

A module may use the parameters of its children without calling them. So the first forward pass
shows which modules are called, and each parameter is waited for before the forward pass of the
innermost called module that contains it. A module that borrows another one, as an attribute that is
no submodule, waits for that one's parameters too.
"""

from collections.abc import Callable, Sequence

from torch import nn


class ForwardWaits:
    """Calls `wait(buckets)` before the forward pass of a module that may use their parameters.

    Args:
        module: whose forward passes wait; so does its `state_dict`, for everything.
        wait: waits for the buckets with these numbers; None for all.
    """

    def __init__(self, module: nn.Module, wait: Callable[[Sequence[int] | None], None]) -> None:
        self._module = module
        self._wait = wait
        self._called: dict[nn.Module, None] = {}
        self._needs: dict[nn.Module, list[int]] = {}
        self._modules = set(module.modules())
        for child in self._modules:
            # Functions, which a deep copy of the module shares; a copy waits for nothing.
            child.register_forward_pre_hook(lambda module, _: self._before(module))
            child.register_state_dict_pre_hook(lambda module, *_: self._before_saving(module))

    def _before(self, module: nn.Module) -> None:
        if module in self._modules:
            self._called.setdefault(module)
            if buckets := self._needs.get(module):
                self._wait(buckets)

    def _before_saving(self, module: nn.Module) -> None:
        if module in self._modules:
            self._wait(None)

    def assign(self, bucket_of: dict[nn.Parameter, int]) -> list[int]:
        """Decides who waits for what, after a forward pass; parameters by their bucket's number.

        Returns:
            All buckets in the order in which that forward pass needed them.
        """
        needs: dict[nn.Module, set[int]] = {}
        modules = dict(self._module.named_modules(remove_duplicate=False))
        for name, owner in modules.items():
            used = [*owner.parameters(recurse=False)]
            for borrowed in vars(owner).values():
                used += borrowed.parameters() if isinstance(borrowed, nn.Module) else ()
            found = {bucket_of[p] for p in used if p in bucket_of}
            while found and modules[name] not in self._called and name:
                name = name.rpartition(".")[0]
            # Of parameters in no called module, anything that is called may be the user.
            users = [modules[name]] if modules[name] in self._called else self._called
            for user in users:
                needs.setdefault(user, set()).update(found)
        self._needs = {module: sorted(buckets) for module, buckets in needs.items()}
        order = [bucket for module in self._called for bucket in self._needs.get(module, ())]
        return list(dict.fromkeys([*order, *sorted(set(bucket_of.values()))]))
