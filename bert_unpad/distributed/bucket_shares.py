"""How the bound on the whole gradient is divided among the buckets of one backward pass.

Buckets arrive one at a time. DDP may have rebuilt them since the last pass, which shows only as
they arrive. Shares therefore add up to 1 whatever arrives. As long as the buckets are those of the
last pass, each gets the share that the policy gives it. From the first one that differs, each gets
a part of the remaining budget: its part of the remaining elements.
"""

from typing import Any, Literal, get_args

import torch
from torch import Tensor

Policy = Literal["equal", "numel", "adaptive"]
POLICIES: tuple[str, ...] = get_args(Policy)

# Part of the budget that `adaptive` divides by size, so that a bucket without a gradient in the
# last step gets a share too. No share changes by more than this part.
_BY_SIZE = 0.01


class BucketShares:
    """Divides C^2, with C the bound on the gradient's norm; `BucketClip` describes the policies.

    Args:
        policy: equal, numel or adaptive.
        numel: number of elements of all buckets together.
    """

    def __init__(self, policy: Policy, numel: int) -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy: expected one of {', '.join(POLICIES)}, got {policy!r}")
        self._policy = policy
        self._numel = numel
        self._sizes: list[int] = []  # elements of each bucket of the last pass
        self._by_size: Tensor | None = None  # the buckets' shares of all elements, on first use
        self._squares: Tensor | None = None  # squared norms of the last pass, for `adaptive`
        self._begin()

    def _begin(self) -> None:
        self._seen: list[int] = []
        self._given: list[float | Tensor] = []
        self._unchanged = bool(self._sizes)  # all buckets so far are those of the last pass
        self._adapted: Tensor | None = None

    def _set_sizes(self, sizes: list[int]) -> None:
        if sizes != self._sizes:
            self._sizes, self._by_size = sizes, None
        self._begin()

    def next(self, numel: int, device: torch.device) -> float | Tensor:
        """Returns the share of the next bucket, which has `numel` elements.

        The share is a float, or float32 [] on `device`.
        """
        position = len(self._seen)
        if not position and self._unchanged and self._policy == "adaptive":
            self._adapted = self._adapt(device)
        self._unchanged = (
            self._unchanged and position < len(self._sizes) and self._sizes[position] == numel
        )
        share = self._by_policy(position, numel) if self._unchanged else self._of_the_rest(numel)
        self._seen.append(numel)
        self._given.append(share)
        return share

    def _by_policy(self, position: int, numel: int) -> float | Tensor:
        if self._policy == "equal":
            return 1.0 / len(self._sizes)
        if self._adapted is not None:
            return self._adapted[position]
        return numel / self._numel

    def _adapt(self, device: torch.device) -> Tensor | None:
        if self._squares is None:
            return None
        if self._by_size is None:
            sizes = torch.tensor(self._sizes, dtype=torch.float32)
            self._by_size = (sizes / self._numel).to(device)
        self._squares = self._squares.to(device)
        squares, by_size = self._squares, self._by_size
        total = squares.sum()
        shares = (1 - _BY_SIZE) * squares / total + _BY_SIZE * by_size
        return torch.where(total > 0, shares, by_size)

    def _of_the_rest(self, numel: int) -> float | Tensor:
        """Divides the budget that is left by size among the elements that are left."""
        left = self._numel - sum(self._seen)
        budget = 1.0 - sum(self._given)
        budget = budget.clamp(min=0.0) if isinstance(budget, Tensor) else max(budget, 0.0)
        return budget * (numel / max(left, numel))

    def end(self, norms: Tensor) -> None:
        """Ends a pass; `norms` are those of its buckets before clipping, float32 [buckets].

        If a norm is not finite, the shares of the previous step remain.
        """
        if self._policy == "adaptive":
            squares = norms.double().square()
            squares = (squares / squares.sum()).float()  # scaled so that float32 does not overflow
            old = self._squares
            if old is None or self._seen != self._sizes:
                old = torch.zeros_like(squares)
            self._squares = torch.where(squares.isfinite().all(), squares, old)
        self._set_sizes(self._seen)

    def state_dict(self) -> dict[str, Any]:
        """Returns what the next pass depends on, as lists of numbers. Waits for the device."""
        squares = [] if self._squares is None else self._squares.tolist()
        return {"sizes": list(self._sizes), "squares": squares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state_dict`; if the next pass has other buckets, they share by size."""
        self._squares = torch.tensor(state["squares"]) if state["squares"] else None
        self._set_sizes(list(state["sizes"]))
