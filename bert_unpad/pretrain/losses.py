"""The sums that the model returns, as the log and the evaluation add them up and average them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bert_unpad.nn import PreTrainingOutput

SUMS = ("mlm_loss", "mlm_correct", "nsp_loss", "nsp_correct")


def stack_outputs(outputs: PreTrainingOutput) -> Tensor:
    """The four sums that the model returns, as float64 [4] on the device, in the order of SUMS.

    float64 holds sums of many fp32 values of like size exactly, so the mean of an interval does not
    depend on whether a checkpoint has cut it in two.
    """
    return torch.stack([value.detach().double() for value in outputs])


def averages(sums: Mapping[str, float]) -> dict[str, float | None]:
    """Mean losses (nats) and accuracies (0 .. 1) of sums and counts; None where nothing counts.

    `loss` is what training minimises: the mean masked-token loss plus the mean next-sentence loss.
    """

    def mean(total: str, count: str) -> float | None:
        return sums[total] / sums[count] if sums[count] else None

    mlm, nsp = mean("mlm_loss", "masked"), mean("nsp_loss", "pairs")
    return {
        "loss": (mlm or 0.0) + (nsp or 0.0),
        "mlm_loss": mlm,
        "mlm_accuracy": mean("mlm_correct", "masked"),
        "nsp_loss": nsp,
        "nsp_accuracy": mean("nsp_correct", "pairs"),
    }
