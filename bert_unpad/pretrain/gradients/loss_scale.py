"""Loss scaling for fp16: Micikevicius et al., "Mixed precision training" (ICLR 2018).

Gradients of fp16 activations underflow below 6e-8. So the loss is multiplied by a large number, the
scale, and gradients are divided by it again. Where a gradient overflows, the update is left out and
the scale is halved; after many updates without an overflow it is doubled. The rule and the settings
are those of `torch.amp.GradScaler`, which looks for overflows in an extra pass over the gradients.
Here each bucket is divided before it is clipped, during the backward pass. Clipping already knows
whether the averaged gradient is finite, and all ranks agree; that result drives the scale.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bert_unpad.optim.parameter_lists import local
from bert_unpad.pretrain.config import LossScaleConfig

_GROWTH, _BACKOFF = 2.0, 0.5  # factors on the scale, as in torch.amp.GradScaler


class LossScale:
    """The scale and how it moves; everything stays on the device, and the host waits for nothing.

    Args:
        config: says how it moves.
        device: of the model.
    """

    def __init__(self, config: LossScaleConfig, device: torch.device) -> None:
        self._config = config
        self.value = torch.full((), config.initial, dtype=torch.float32, device=device)
        """float32 []: what losses are multiplied by."""
        self._good = torch.zeros((), dtype=torch.int32, device=device)  # updates since it moved

    def unscale_(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divides the gradients that are there by the scale, in place."""
        gradients = [local(p.grad) for p in parameters if p.grad is not None]
        if gradients:
            torch._foreach_div_(gradients, self.value)

    def update(self, finite: Tensor) -> None:
        """After a step: halves the scale, or doubles it after many steps without an overflow.

        Args:
            finite: bool [], whether the averaged gradient is; the same on all ranks.
        """
        torch._amp_update_scale_(
            *(self.value, self._good, (~finite).float()),
            *(_GROWTH, _BACKOFF, self._config.growth_interval),
        )

    def state_dict(self) -> dict[str, Any]:
        """The scale and the updates since it moved, as JSON. Waits for the device."""
        return {"scale": float(self.value), "growth_tracker": int(self._good)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from `state_dict`; an empty one changes nothing."""
        if state:
            self.value.fill_(state["scale"])
            self._good.fill_(state["growth_tracker"])
