"""OneBitAdam: Adam whose ranks exchange one bit a value once its variance is stable."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bert_unpad.optim.one_bit import OneBitOptimizer, Scale
from bert_unpad.optim.parameter_lists import ParameterList, scalar


class OneBitAdam(OneBitOptimizer):
    """1-bit Adam (Tang et al., ICML 2021, arXiv:2102.02888) with AdamW's weight decay.

    For `freeze_step` steps it is Adam on averaged gradients. Then the variance v stays as it is,
    gradients are no longer averaged, and each step averages m = beta1 * m + (1 - beta1) * g over
    the ranks, with one bit a value and error feedback (`distributed.OneBitAllreduce`). The update
    is lr * m / (sqrt(v) + eps). One rank alone compresses nothing.

    Until then the next step needs averaged gradients, afterwards each rank's own:
    `averages_gradients` says which. Under DDP, `distributed.OptimizerAllreduce` is the state of a
    communication hook that does as it says.

    A weight that had no gradient at all has v = 0, and afterwards only decays: the paper's update
    would divide by eps alone. (The authors' implementation takes a mask for such weights.)

    `state_dict` has the names of `torch.optim.AdamW`, and `variance_step`, the number of updates
    that v had. What only a rank has, its errors, is in `local_state`.

    Args:
        params: parameters or groups: float32, bfloat16 or float16, contiguous, on one device, the
            same on all ranks; no DTensors, and not in ZeroRedundancyOptimizer.
        lr: learning rate.
        betas: decay rates of the moments.
        eps: added to the root of the variance.
        weight_decay: decay rate of the weights, decoupled.
        freeze_step: steps of plain Adam; 1 or more.
        bias_correction: correct the moments' bias towards zero. That of the variance stays as it is
            when the variance does. (The paper's Adam has none.)
        master_weights: keep float32 weights of 16-bit parameters in the state.
        skip_non_finite: skip a step with an infinite or NaN gradient, while gradients are averaged,
            and count it in `skipped_steps`. Afterwards all ranks always skip such a step together,
            and leave errors and state as they are.
        group: the ranks, by default all; one if torch.distributed is not initialised.
        scale: what has one scale when momenta are compressed. "buffer": all values, as in the
            authors' implementation. Else each value is first multiplied by one over the root of the
            mean variance of its tensor, of its row (the first dimension of a parameter with
            several), or by that of its own ("element"), to a power of 2, and divided afterwards.
            That sends nothing more, because all ranks have the same variance, and takes 4 bytes a
            parameter more.

    Raises:
        ValueError: a number is out of range, or `scale` unknown; the message names it.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        freeze_step: int = 1000,
        bias_correction: bool = True,
        master_weights: bool = False,
        skip_non_finite: bool = False,
        group: dist.ProcessGroup | None = None,
        scale: Scale = "buffer",
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        options |= {"bias_correction": bias_correction, "master_weights": master_weights}
        super().__init__(params, options, freeze_step, skip_non_finite, group, scale)

    def _state_of(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        state = super()._state_of(param, group)
        if "variance_step" not in state:
            state["variance_step"] = torch.zeros_like(state["step"])
        return state

    def _update(
        self, group: dict[str, Any], parameters: ParameterList, common: dict[str, Any]
    ) -> None:
        super()._update(group, parameters, common)
        torch._foreach_copy_(parameters.tensors["variance_step"], parameters.tensors["step"])

    def _own_step(self) -> None:
        self._fill_with_momenta()
        guard = self._average()
        for segment in self._segments:
            group = segment.group
            self._apply(
                segment,
                segment.views,
                scalar(group["lr"], guard.device),
                guard,
                weight_decay=group["weight_decay"],
                bias_correction=group["bias_correction"],
            )
