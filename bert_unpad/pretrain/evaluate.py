"""Evaluation on held-out examples: the same examples and masks every time, split over the ranks."""

from contextlib import AbstractContextManager

import numpy as np
import torch
from numpy.typing import NDArray

from bert_unpad.batch import PackedInputs
from bert_unpad.data import PackedCollator, Prefetcher
from bert_unpad.data.objective import Objective
from bert_unpad.nn import EncoderForPreTraining
from bert_unpad.pretrain.feed.steps import count_labels
from bert_unpad.pretrain.losses import SUMS, averages, stack_outputs
from bert_unpad.pretrain.model import to_device
from bert_unpad.pretrain.ranks import Ranks


class Evaluator:
    """Measures a model on held-out examples.

    Args:
        collator: of the held-out set.
        examples: how many to use at most; of more, those whose lengths are as in training.
        lengths: of the training examples, [N].
        batch_size: sequences per forward pass on one rank.
        ranks: the processes that share the work.
        autocast: context of the forward pass.
        objective: whose losses and accuracies to report.
    """

    def __init__(
        self,
        collator: PackedCollator,
        examples: int,
        lengths: NDArray[np.integer],
        batch_size: int,
        ranks: Ranks,
        autocast: AbstractContextManager,
        objective: Objective = "mlm_nsp",
    ) -> None:
        chosen = choose_by_length(collator.dataset.lengths, lengths, examples)
        used = len(chosen)
        # Dealt out in order of length, so that all ranks get the same work.
        mine = chosen[::-1][ranks.rank :: ranks.world_size]
        self.examples = used
        # As many on all ranks, some of them empty: under FSDP a forward pass takes all ranks.
        count = -(-used // (ranks.world_size * batch_size))
        self._batches = [mine[i * batch_size : (i + 1) * batch_size] for i in range(count)]
        self._collator = collator
        self._ranks = ranks
        self._autocast = autocast
        self._objective = objective

    @torch.no_grad()
    def __call__(self, model: EncoderForPreTraining) -> dict[str, float | None]:
        """Losses (nats) and accuracies (0 .. 1) over all examples; see `losses.averages`.

        All ranks must call it with the same parameters, and get the same result. The model is left
        in training mode.
        """
        device = self._ranks.device
        sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        counts = np.zeros(3)
        model.eval()
        with Prefetcher(self._collator, self._batches, pin_memory=device.type == "cuda") as batches:
            for inputs in batches:
                counts += (*count_labels(inputs), inputs.batch.total)
                sums += self._forward(model, inputs)
        model.train()
        both = torch.cat([sums, torch.from_numpy(counts).to(device)])
        total = zip(
            (*SUMS, "masked", "pairs", "tokens"), self._ranks.sum(both).tolist(), strict=True
        )
        return averages(dict(total), self._objective)

    def _forward(self, model: EncoderForPreTraining, inputs: PackedInputs) -> torch.Tensor:
        with self._autocast:
            return stack_outputs(model(to_device(inputs, model, self._ranks.device)))


def choose_by_length(
    available: NDArray[np.integer], like: NDArray[np.integer], most: int
) -> NDArray[np.int64]:
    """Chooses examples whose lengths are distributed as others are, as far as there are such.

    A loss depends on the length of the texts, so the losses of training and evaluation could not be
    compared otherwise; few held-out documents may be longer than most by chance.

    Args:
        available: lengths of the examples to choose from.
        like: lengths of the others.
        most: how many to choose at most; all, if there are no more.

    Returns:
        Numbers of examples, each once, the shortest first.
    """
    order = np.argsort(available, kind="stable").astype(np.int64)
    if len(order) <= most or not len(like):
        return order[:most]
    # At equal distances among those of one length.
    ranks = np.arange(most)
    wanted = np.sort(like)[((2 * ranks + 1) * len(like)) // (2 * most)]
    lengths = available[order]
    first, behind = (np.searchsorted(lengths, wanted, side) for side in ("left", "right"))
    _, index, counts = np.unique(wanted, return_index=True, return_counts=True)
    place = (ranks - index.repeat(counts)) * (behind - first) // counts.repeat(counts)
    taken = np.maximum.accumulate(first + place - ranks) + ranks  # each once
    return order[np.minimum(taken, len(order) - most + ranks)]
