"""The gradient of a step is that of the global batch, however it is split over ranks and passes."""

import itertools

import numpy as np
import pytest
import torch

from bert_unpad.batch import PackedInputs, VarlenBatch
from bert_unpad.nn import BertConfig, BertForPreTraining
from bert_unpad.pretrain.config import ClipConfig, PretrainConfig
from bert_unpad.pretrain.feed.steps import Step, count_labels
from bert_unpad.pretrain.losses import averages
from bert_unpad.pretrain.output.metrics import Window
from bert_unpad.pretrain.parallel import make_way
from bert_unpad.pretrain.parallel.way import seed_step
from bert_unpad.pretrain.ranks import HostSums, Ranks
from bert_unpad.pretrain.run import Run
from tests.support.processes import run_ranks
from tests.support.seeds import derived
from tests.support.tolerances import STEP, assert_same_gradients

LENGTHS = [9, 3, 7, 12, 1, 5, 8, 4]
# Which sequences of the global batch each rank gets; the last split leaves one rank without any.
SPLITS = {
    1: [[0, 1, 2, 3, 4, 5, 6, 7]],
    2: [[3, 4], [0, 1, 2, 5, 6, 7]],
    3: [[0, 1, 2], [3, 4, 5, 6, 7], []],
}
PASSES = (1, 3)


def _model() -> BertForPreTraining:
    torch.manual_seed(derived(7))
    return BertForPreTraining(
        BertConfig(
            vocab_size=50,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.3,
        )
    )


def _inputs(sequences: list[int]) -> PackedInputs:
    """The chosen sequences of one fixed global batch; the number of masked tokens differs."""
    ids, positions, labels, pairs, begin = [], [], [], [], 0
    for index in sequences:
        draw = np.random.default_rng(derived(index))
        ids.append(draw.integers(0, 50, LENGTHS[index]))
        masked = np.flatnonzero(draw.random(LENGTHS[index]) < 0.1 * (index + 1))
        positions.append(masked + begin)
        labels.append(draw.integers(0, 50, len(masked)))
        pairs.append(-100 if index == 5 else index % 2)
        begin += LENGTHS[index]

    def joined(parts: list) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *parts]).astype(np.int64))

    return PackedInputs.build(
        VarlenBatch.from_lengths([LENGTHS[index] for index in sequences]),
        joined(ids),
        masked_positions=joined(positions),
        masked_labels=joined(labels),
        next_sentence_labels=torch.tensor(pairs, dtype=torch.int64),
    )


def _expected() -> dict[str, torch.Tensor]:
    """The gradient of mean masked-token loss + mean next-sentence loss, without the trainer."""
    model = _model()
    inputs = _inputs(SPLITS[1][0])
    outputs = model(inputs)
    pairs = (inputs.next_sentence_labels >= 0).sum()
    (outputs.mlm_loss_sum / inputs.num_masked + outputs.nsp_loss_sum / pairs).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _gradients(rank: int, world_size: int) -> list[tuple[dict[str, torch.Tensor], dict]]:
    """This rank's gradient and means of losses, for each number of passes."""
    ranks = Ranks(rank, world_size, torch.device("cpu"), None)
    return [_gradient(ranks, np.array(SPLITS[world_size][rank], np.int64), n) for n in PASSES]


def _gradient(ranks: Ranks, mine: np.ndarray, passes: int) -> tuple[dict[str, torch.Tensor], dict]:
    model = _model()
    way = make_way(Run(PretrainConfig(clip=ClipConfig(mode="none")), ranks, model))
    way.make_optimizer()
    way.begin()
    inputs = tuple(_inputs(mine[first::passes].tolist()) for first in range(passes))
    masked, pairs = np.sum([count_labels(part) for part in inputs], axis=0)
    step = Step(inputs, 0, mine, {"masked": masked, "pairs": pairs})
    window = Window(ranks)
    counts = HostSums(ranks, step.counts)
    window.add_losses(way.accumulate(step, counts))
    window.add_counts(counts.on_host())
    gradient = {name: parameter.grad for name, parameter in model.named_parameters()}
    return gradient, averages(window.close(), "mlm_nsp")


@pytest.mark.parametrize("world_size", SPLITS)
def test_gradient_is_that_of_the_global_batch(world_size):
    expected = _expected()
    by_rank = [_gradients(0, 1)] if world_size == 1 else run_ranks(_gradients, world_size)
    means = by_rank[0][0][1]
    assert 0 < means["mlm_loss"] < 20
    assert 0 < means["nsp_loss"] < 5
    for gradient, same_means in (result for results in by_rank for result in results):
        assert same_means == pytest.approx(means, rel=STEP)
        assert_same_gradients(gradient, expected)


def test_random_numbers_of_a_step_follow_from_seed_step_and_rank():
    places = list(itertools.product(range(2), repeat=3))
    found = {}
    for place in [*places, *reversed(places)]:
        seed_step(*place)
        drawn = tuple(torch.rand(4).tolist())
        assert found.setdefault(place, drawn) == drawn
    assert len(set(found.values())) == len(places)
