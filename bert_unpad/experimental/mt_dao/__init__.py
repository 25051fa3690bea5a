"""MTDAO: Adam with a slow momentum, whose steps are local and whose state is averaged at times."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from bert_unpad.optim.checks import check_count, check_number, check_options
from bert_unpad.optim.copying import CopyableOptimizer

# Which period each tensor of a parameter's state has.
_PERIODS = {
    "exp_avg": "momentum_period",
    "exp_avg_fast": "momentum_period",
    "exp_avg_sq": "variance_period",
}


class MTDAO(CopyableOptimizer):
    """MT-DAO on top of AdamW: a slow and a fast momentum, averaged over the ranks every K steps.

    Iacob et al., "MT-DAO: Multi-timescale distributed adaptive optimizers with local updates"
    (ICLR 2026), arXiv:2510.05361. Each rank steps with its own gradient g:

        u = beta1 u + (1 - beta1) g                 slow momentum
        v = beta2 v + (1 - beta2) g^2
        x = x - lr ((1 - w) g + w u) / (sqrt(v) + eps)

    After every K-th step the ranks average x, u and v. u and v may have periods of their own. After
    32 local steps a momentum with beta1 = 0.999 still points where all ranks went together; one
    with 0.9 has forgotten it.

    The paper allows any number of momenta; here they are the slow one and, if `fast_beta` is not 0,
    a fast one in place of g. Of its variants (Adam, ADOPT, SGD) this is the first. As in the
    authors' code (github.com/Iacob-Alexandru-Andrei/torchtitan), the moments' bias is corrected,
    and averages come after the step. Chosen here: weights decay as in PyTorch's AdamW. The first
    `start` steps are a warm-up with averaged gradients, and periods count from its end.

    All ranks must call `step` equally often, with gradients of the same parameters. An average is
    one message, and takes the memory of a copy of what is averaged.

    Args:
        params: parameters or groups: floating point.
        lr: learning rate.
        betas: decay rates of the slow momentum and of the second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay rate.
        slow_weight: w above, in [0, 1]; the default is that of the authors' code for ADOPT.
        fast_beta: decay rate of the fast momentum; 0: the gradient itself, which takes no memory.
        period: steps between averages of the parameters; the paper's 32.
        momentum_period: steps between averages of the momenta; None: `period`.
        variance_period: steps between averages of the second moment; None: `period`.
        start: steps of the warm-up, whose gradients are the same on all ranks.
        group: the ranks that average; None: all, or none if there is no process group.

    Raises:
        ValueError: a number is out of range; the message names it.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.999, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        slow_weight: float = 0.9,
        fast_beta: float = 0.0,
        period: int = 32,
        momentum_period: int | None = None,
        variance_period: int | None = None,
        start: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        check_options(lr, betas, eps, weight_decay)
        if not (isinstance(slow_weight, float | Real) and 0 <= slow_weight <= 1):
            raise ValueError(f"slow_weight: expected a number in [0, 1], got {slow_weight!r}")
        check_number("fast_beta", fast_beta, below=1)
        periods = {
            "period": period,
            "momentum_period": period if momentum_period is None else momentum_period,
            "variance_period": period if variance_period is None else variance_period,
        }
        for name, value in periods.items():
            check_count(name, value)
        check_count("start", start, least=0)
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options | {"slow_weight": slow_weight, "fast_beta": fast_beta})
        self.start, self.group = start, group
        self._periods = periods

    @property
    def steps(self) -> int:
        """Steps so far."""
        return max((int(state["step"]) for state in self.state.values()), default=0)

    @property
    def averages_gradients(self) -> bool:
        """Whether the next step is of the warm-up, and takes averaged gradients."""
        return self.steps < self.start

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters that have a gradient, see `FusedAdam`; averages what is due."""
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        updated = []
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(group, params)
                updated += params
        self._average_due(updated)
        return loss

    def _state_of(self, param: Tensor, fast: bool) -> dict[str, Tensor]:
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)  # on the CPU, which asks for it
        for name in ("exp_avg", "exp_avg_sq", *(["exp_avg_fast"] if fast else [])):
            if name not in state:
                state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
        state["step"] += 1
        return state

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        beta1, beta2 = group["betas"]
        weight, fast_beta, lr = group["slow_weight"], group["fast_beta"], group["lr"]
        grads = [p.grad for p in params if p.grad is not None]
        if any(grad.is_sparse for grad in grads):
            raise RuntimeError("MTDAO does not support sparse gradients")
        states = [self._state_of(p, fast_beta > 0) for p in params]
        counts = [int(state["step"]) for state in states]
        slow, squares = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        torch._foreach_lerp_(slow, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        directions = torch._foreach_mul(slow, [weight / (1 - beta1**n) for n in counts])
        if fast_beta > 0:
            fast = [state["exp_avg_fast"] for state in states]
            torch._foreach_lerp_(fast, grads, 1 - fast_beta)
            factors = [(1 - weight) / (1 - fast_beta**n) for n in counts]
            torch._foreach_add_(directions, torch._foreach_mul(fast, factors))
        else:
            torch._foreach_add_(directions, grads, alpha=1 - weight)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_mul_(roots, [1 / math.sqrt(1 - beta2**n) for n in counts])
        torch._foreach_add_(roots, group["eps"])
        torch._foreach_addcdiv_(params, directions, roots, -lr)

    def _average_due(self, params: Sequence[Tensor]) -> None:
        """Averages what is due after this step, a message for each kind, dtype and device."""
        if not (dist.is_available() and dist.is_initialized()):
            return
        due: dict[Any, list[Tensor]] = defaultdict(list)
        for param in params:
            state = self.state[param]
            done = int(state["step"]) - self.start
            tensors = {name: state[name] for name in _PERIODS if name in state}
            for name, tensor in {"param": param, **tensors}.items():
                if done > 0 and done % self._periods[_PERIODS.get(name, "period")] == 0:
                    due[name, tensor.dtype, tensor.device].append(tensor)
        for alike in due.values():
            flat = _flatten_dense_tensors(alike)
            dist.all_reduce(flat, group=self.group)
            flat.div_(dist.get_world_size(self.group))
            torch._foreach_copy_(alike, list(_unflatten_dense_tensors(flat, alike)))
