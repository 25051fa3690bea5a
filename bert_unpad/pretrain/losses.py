"""The tasks of each objective, and their sums as log and evaluation average them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bert_unpad.data.objective import Objective
from bert_unpad.nn import PreTrainingOutput

if TYPE_CHECKING:
    from bert_unpad.nn import ReplacedTokenPreTrainingOutput


@dataclass(frozen=True)
class Task:
    """One thing that a model learns; its loss is a mean over the global batch."""

    name: str
    """Begins the names of its figures: mlm_loss, mlm_accuracy."""
    title: str
    """The task's name in the report."""
    count: str
    """What its sums are divided by, a name in `Step.counts`."""
    weight: float = 1.0
    """Factor of the task's mean loss in the loss."""


_MLM = Task("mlm", "masked-token", "masked")

TASKS: dict[Objective, tuple[Task, ...]] = {
    "mlm_nsp": (_MLM, Task("nsp", "next-sentence", "pairs")),
    "mlm": (_MLM,),
    "mlm_sop": (_MLM, Task("sop", "sentence-order", "pairs")),
    "rtd": (_MLM, Task("rtd", "replaced-token", "tokens", weight=50.0)),
}
"""The tasks of each objective, in the order in which the model returns their sums."""

SUMS = ("mlm_loss", "mlm_correct", "second_loss", "second_correct")
"""Names of the sums of the first and the second task."""


def stack_outputs(outputs: PreTrainingOutput | ReplacedTokenPreTrainingOutput) -> Tensor:
    """The four sums that the model returns, as float64 [4] on the device, in the order of SUMS.

    float64 holds sums of many fp32 values of like size exactly, so the mean of an interval does not
    depend on whether a checkpoint has cut it in two.
    """
    return torch.stack([value.detach().double() for value in outputs])


def averages(sums: Mapping[str, float], objective: Objective) -> dict[str, float | None]:
    """Mean losses (nats) and accuracies (0 .. 1) of sums and counts; None where nothing counts.

    `loss` is what training minimises: the weighted sum of the mean losses of the objective's tasks.
    """
    means: dict[str, float | None] = {}
    total = 0.0
    for task, *names in zip(TASKS[objective], SUMS[::2], SUMS[1::2], strict=False):
        count = sums[task.count]
        loss, correct = (sums[name] / count if count else None for name in names)
        means[f"{task.name}_loss"], means[f"{task.name}_accuracy"] = loss, correct
        total += task.weight * (loss or 0.0)
    return {"loss": total, **means}
