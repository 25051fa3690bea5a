"""That the contenders of benchmarks.packing compute the same."""

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import packing
from tests.support.seeds import derived

LENGTHS = [30, 24, 17, 9, 8, 5, 3, 2]


def test_all_compute_the_same_loss_and_gradient():
    losses, gradients = [], []
    for loss, model, batch in packing.contenders("tiny", LENGTHS, 32, derived(0)).values():
        model.zero_grad()
        value = loss(batch)
        value.backward()
        losses.append(value.item())
        squares = [p.grad.double().square().sum() for p in model.parameters()]
        gradients.append(float(torch.stack(squares).sum().sqrt()))
    assert losses[1:] == pytest.approx(losses[:1] * 3, rel=1e-5)
    assert gradients[1:] == pytest.approx(gradients[:1] * 3, rel=1e-4)


def test_rows_hold_every_sequence_once():
    inputs = packing.contenders("tiny", LENGTHS, 32, derived(0))[packing.UNPADDED][2]
    rows = packing.RowInputs.build(inputs, 32)
    assert rows.input_ids.shape == (4, 32)  # 98 tokens
    flat = rows.input_ids.flatten()
    for start, sequence in zip(rows.first.tolist(), inputs.input_ids.split(LENGTHS), strict=True):
        assert flat[start : start + len(sequence)].tolist() == sequence.tolist()
    # A token sees as many as its sequence has.
    seen = rows.mask.sum(-1)[:, 0].flatten()[rows.first]
    assert seen.tolist() == LENGTHS
