"""masked_cross_entropy on the model of a block."""

from functools import cache

import torch
from torch import Tensor

from gpu_model.block_model import Model
from gpu_model.build import KERNELS, load
from tests.support.backends import on_the_model
from tests.support.model_checks import DTYPES, Buffers


@cache
def model() -> Model:
    return Model(load(KERNELS / "loss.cpp"))


def _sizes(logits: Tensor, vocab_size: int, ignore_index: int) -> tuple[int, ...]:
    return (DTYPES[logits.dtype], *logits.shape, vocab_size, ignore_index)


@on_the_model(model)
def masked_cross_entropy(
    logits: Tensor, labels: Tensor, vocab_size: int, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor]:
    buffers = Buffers(model())
    lse, row_losses = torch.empty(len(logits)), torch.empty(len(logits), 2)
    loss, correct = torch.empty(()), model().register(torch.tensor(-7))
    model().call(
        "loss_forward", *_sizes(logits, vocab_size, ignore_index), buffers.read(logits),
        buffers.read(labels), *map(buffers.write, (lse, row_losses, loss)), correct,
    )  # fmt: skip
    return loss, correct, lse


def _run_backward(
    dloss: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, dlogits: Tensor, vocab_size: int,
    ignore_index: int,
) -> None:  # fmt: skip
    """dlogits may be the logits."""
    buffers = Buffers(model())
    saved = [buffers.read(t) for t in (labels, lse, dloss)]
    if dlogits is logits:
        model().register(logits)
    else:
        buffers.read(logits)
        buffers.write(dlogits)
    sizes = _sizes(logits, vocab_size, ignore_index)
    model().call("loss_backward", *sizes, logits, *saved, dlogits)


@on_the_model(model)
def masked_cross_entropy_backward(
    dloss: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, vocab_size: int, ignore_index: int
) -> Tensor:
    dlogits = torch.empty_like(logits)
    _run_backward(dloss, logits, labels, lse, dlogits, vocab_size, ignore_index)
    return dlogits


@on_the_model(model)
def masked_cross_entropy_backward_(
    dloss: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, vocab_size: int, ignore_index: int
) -> None:
    _run_backward(dloss, logits, labels, lse, logits, vocab_size, ignore_index)
