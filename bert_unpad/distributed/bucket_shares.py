"""How the bound on the whole gradient is shared out among the buckets of one backward pass.

Buckets come one at a time, and DDP may have made new ones since the last pass, which shows only as
they come. Shares are therefore given out such that they add up to 1 whatever comes: as the policy
says while the buckets are those of the last pass; from the first that is not, each gets of what is
left its part of the elements that are left.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

__all__ = ["POLICIES", "Policy", "Shares"]

Policy = Literal["equal", "numel", "adaptive"]
POLICIES: tuple[str, ...] = get_args(Policy)

# Part of the budget that `adaptive` gives out by size: a bucket that had no gradient in the last
# step gets some, while shares move by no more than this.
_BY_SIZE = 0.01


class Shares:
    """Shares of C^2, C the bound on the gradient's norm; see `BucketClip` for the policies.

    Args:
        policy: equal, numel or adaptive.
        numel: elements of all buckets together.
    """

    def __init__(self, policy: Policy, numel: int) -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {POLICIES}, got {policy!r}")
        self._policy = policy
        self._numel = numel
        self._sizes: list[int] = []  # of the buckets of the last pass
        self._by_size: Tensor | None = None  # their shares of the elements, once asked for
        self._squares: Tensor | None = None  # of their norms; adaptive, and not before a pass
        self._begin()

    def _begin(self) -> None:
        self._seen: list[int] = []
        self._given: list[float | Tensor] = []
        self._settled = bool(self._sizes)
        self._adapted: Tensor | None = None

    def _set_sizes(self, sizes: list[int]) -> None:
        if sizes != self._sizes:
            self._sizes, self._by_size = sizes, None
        self._begin()

    def next(self, numel: int, device: torch.device) -> float | Tensor:
        """The share of the next bucket, which has `numel` elements.

        A float, or float32 [] on `device`.
        """
        position = len(self._seen)
        if not position and self._settled and self._policy == "adaptive":
            self._adapted = self._adapt(device)
        self._settled = (
            self._settled and position < len(self._sizes) and self._sizes[position] == numel
        )
        share = self._planned(position, numel) if self._settled else self._of_the_rest(numel)
        self._seen.append(numel)
        self._given.append(share)
        return share

    def _planned(self, position: int, numel: int) -> float | Tensor:
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
        left = self._numel - sum(self._seen)
        budget = 1.0 - sum(self._given)
        budget = budget.clamp(min=0.0) if isinstance(budget, Tensor) else max(budget, 0.0)
        return budget * (numel / max(left, numel))

    def end(self, norms: Tensor) -> None:
        """Closes a pass; `norms` are float32 [buckets], before clipping.

        Norms that are not finite teach nothing: the shares stay those of the step before.
        """
        if self._policy == "adaptive":
            squares = norms.double().square()
            squares = (squares / squares.sum()).float()  # no overflow, and the same shares
            old = self._squares
            if old is None or self._seen != self._sizes:
                old = torch.zeros_like(squares)
            self._squares = torch.where(squares.isfinite().all(), squares, old)
        self._set_sizes(self._seen)

    def state_dict(self) -> dict[str, Any]:
        """What the next pass depends on, as lists of numbers. Waits for the device."""
        squares = [] if self._squares is None else self._squares.tolist()
        return {"sizes": list(self._sizes), "squares": squares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state_dict`; buckets of other sizes start anew, in the next pass."""
        self._squares = torch.tensor(state["squares"]) if state["squares"] else None
        self._set_sizes(list(state["sizes"]))
