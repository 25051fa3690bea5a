"""FusedAdam: Adam and AdamW in one pass over all parameters."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from bert_unpad.ops.optim import adam_
from bert_unpad.optim.base import FusedOptimizer
from bert_unpad.optim.parameter_lists import ParameterList


class FusedAdam(FusedOptimizer):
    """AdamW (Loshchilov and Hutter, ICLR 2019), or Adam with L2, in one pass over all parameters.

    State dicts can be exchanged with `torch.optim.AdamW`. On a GPU the step counts, and a learning
    rate that is a tensor, stay on the device; so a step can be captured in a CUDA graph.

    Args:
        params: parameters or groups: float32, bfloat16 or float16, contiguous; also DTensors.
        lr: learning rate; a tensor if it should change between replays of a captured graph.
        betas: decay rates of the moments.
        eps: added to the root of the second moment.
        weight_decay: decay rate; see `decoupled_weight_decay`.
        decoupled_weight_decay: True decays weights as AdamW does; False adds the decay to the
            gradient.
        bias_correction: correct the moments' bias towards zero in early steps.
        maximize: ascend instead of descend.
        master_weights: keep float32 weights of 16-bit parameters in the state.
        max_grad_norm: divide gradients by max(1, norm / max_grad_norm); None: do not clip.
        skip_non_finite: skip a step with an infinite or NaN gradient, and count it in
            `skipped_steps`. It takes an extra pass over the gradients. `max_grad_norm` implies it
            and takes the same pass.
        norm_group: processes to sum squared norms over. ZeroRedundancyOptimizer needs it, because
            each rank sees only some of the parameters.
        amsgrad: must be False.

    Raises:
        ValueError: a number is out of range; the message names it.
    """

    updates_by = "elements"  # for the trainer, as in the other classes

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        decoupled_weight_decay: bool = True,
        bias_correction: bool = True,
        maximize: bool = False,
        master_weights: bool = False,
        max_grad_norm: float | None = None,
        skip_non_finite: bool = False,
        norm_group: dist.ProcessGroup | None = None,
        amsgrad: bool = False,
    ) -> None:
        if amsgrad:
            raise ValueError("amsgrad: expected False, got True")
        options = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "decoupled_weight_decay": decoupled_weight_decay,
            "bias_correction": bias_correction,
            "master_weights": master_weights,
        }
        super().__init__(params, options, max_grad_norm, skip_non_finite, norm_group)

    def _update(
        self, group: dict[str, Any], parameters: ParameterList, common: dict[str, Any]
    ) -> None:
        tensors = parameters.tensors
        adam_(
            *(tensors["param"], tensors["grad"], tensors["exp_avg"], tensors["exp_avg_sq"]),
            tensors["step"],
            masters=tensors["master_param"],
            betas=tuple(group["betas"]),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            max_grad_norm=self.max_grad_norm or 0.0,
            decoupled=group["decoupled_weight_decay"],
            bias_correction=group["bias_correction"],
            maximize=group["maximize"],
            **common,
        )
