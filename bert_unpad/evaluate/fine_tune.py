"""Fine-tunes a model as in BERT's appendix A.3 (Devlin et al., 2019, arXiv:1810.04805)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from bert_unpad.evaluate.features import Feature
from bert_unpad.evaluate.tasks import Task

__all__ = ["FineTuning", "fine_tune", "score"]


@dataclass(frozen=True)
class FineTuning:
    """The settings of a fine-tuning, which its results note."""

    epochs: int
    batch_size: int
    lr: float
    warmup_share: float
    """Share of the updates in which the learning rate rises; then it falls to 0, both linearly."""
    weight_decay: float
    max_length: int
    stride: int
    precision: str
    padded: bool
    """Whether the model runs as transformers has it, on padded batches."""


def fine_tune(
    model: nn.Module,
    tokenizer: Any,
    task: Task,
    features: Sequence[Feature],
    settings: FineTuning,
    seed: int,
) -> None:
    """Trains a model in place, with AdamW and the norm of the gradient bounded by 1.

    Args:
        model: of transformers, with the task's head, on its device.
        tokenizer: pads batches.
        task: says what the loss is.
        features: of the training rows.
        settings: how.
        seed: of the order of the features and of dropout.
    """
    torch.manual_seed(seed)
    order = np.random.default_rng(seed)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=settings.lr)
    total = settings.epochs * -(-len(features) // settings.batch_size)
    warmup = round(settings.warmup_share * total)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda done: min((done + 1) / max(warmup, 1), (total - done) / max(total - warmup, 1), 1.0),
    )
    model.train()
    for _ in range(settings.epochs):
        shuffled = order.permutation(len(features))
        for chosen in _batches(shuffled, settings.batch_size):
            batch = [features[i] for i in chosen]
            with _autocast(model, settings):
                loss = _loss(model, _inputs(model, tokenizer, batch), task, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def score(
    model: nn.Module,
    tokenizer: Any,
    task: Task,
    features: Sequence[Feature],
    settings: FineTuning,
) -> list[NDArray]:
    """The scores of each feature: float32 [classes], or [tokens, 2] for answers."""
    model.eval()
    scores: list[NDArray] = [np.empty(0)] * len(features)
    by_length = np.argsort([-len(feature["input_ids"]) for feature in features], kind="stable")
    for chosen in _batches(by_length, settings.batch_size):
        batch = [features[i] for i in chosen]
        inputs = _inputs(model, tokenizer, batch)
        with _autocast(model, settings):
            output = model(**inputs)
        found = output.logits if task.classes else _spans(output, inputs)
        for i, feature, values in zip(chosen, batch, found.float().cpu().numpy(), strict=True):
            scores[i] = values if task.classes else values[: len(feature["input_ids"])]
    return scores


def _batches(indices: NDArray[np.int64], size: int) -> Iterator[NDArray[np.int64]]:
    for begin in range(0, len(indices), size):
        yield indices[begin : begin + size]


def _inputs(model: nn.Module, tokenizer: Any, batch: Sequence[Feature]) -> dict[str, Tensor]:
    names = [name for name in ("input_ids", "token_type_ids") if name in batch[0]]
    rows = [{name: feature[name] for name in names} for feature in batch]
    padded = tokenizer.pad(rows, padding_side="right", return_tensors="pt")
    device = next(model.parameters()).device
    return {name: tensor.to(device) for name, tensor in padded.items()}


def _spans(output: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Scores of a start and an end, [B, S, 2]; -inf at padding, which is no answer."""
    both = torch.stack([output.start_logits, output.end_logits], -1)
    return both.masked_fill(inputs["attention_mask"][..., None] == 0, -torch.inf)


def _loss(
    model: nn.Module, inputs: dict[str, Tensor], task: Task, batch: Sequence[Feature]
) -> Tensor:
    output, device = model(**inputs), inputs["input_ids"].device
    if not task.classes:
        spans = _spans(output, inputs).float()
        sides = [torch.tensor([f[side] for f in batch], device=device) for side in ("start", "end")]
        start, end = (F.cross_entropy(spans[..., i], sides[i]) for i in (0, 1))
        return (start + end) / 2
    labels = torch.tensor([feature["labels"] for feature in batch], device=device)
    if task.classes == 1:
        return F.mse_loss(output.logits.float().squeeze(-1), labels.float())
    return F.cross_entropy(output.logits.float(), labels)


def _autocast(model: nn.Module, settings: FineTuning) -> AbstractContextManager:
    if settings.precision == "fp32":
        return nullcontext()
    return torch.autocast(next(model.parameters()).device.type, dtype=torch.bfloat16)
