"""A few training steps of a model, with the encoder's linear layers in 16 or 8 bits."""

from statistics import fmean

import pytest
import torch

from bert_unpad.batch import PackedInputs
from bert_unpad.nn import BertForPreTraining
from bert_unpad.ops.delayed_scaling import DelayedScale
from tests.support.seeds import derived

# A small model whose weights can be in 8 bits: all sizes are multiples of 16.
SIZES = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
STEPS = 8


def noted(scale: float) -> DelayedScale:
    """A scale that nothing has moved yet."""
    return DelayedScale(torch.tensor(scale), torch.zeros(1024))


def train(
    model: BertForPreTraining,
    inputs: PackedInputs,
    *,
    fp8: bool,
    recompute: str = "none",
    window: int | None = None,
) -> list[float]:
    """The losses of STEPS updates with AdamW on one batch, activations in bf16.

    Args:
        model: float32, on the CPU; it is trained.
        inputs: the batch of every step.
        fp8: compute the encoder's linear layers in 8 bits.
        recompute: what the encoder computes again, as `Encoder.recompute` says.
        window: number of updates that delayed scales come from; None: scales of the tensors' own
            largest values.
    """
    encoder = model.train().bert.encoder
    encoder.fp8, encoder.recompute = fp8, recompute
    scaling = None if window is None else encoder.delay_scaling(window)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(derived(step))
        with torch.autocast("cpu", torch.bfloat16):
            out = model(inputs)
        loss = out.mlm_loss_sum / len(inputs.masked_labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if scaling is not None:
            scaling.update()
        losses.append(loss.item())
    return losses


def assert_near(losses: list[float], wide: list[float]) -> None:
    """Eight bits move a loss by the rounding of 3 bits of mantissa: over 40 seeds by at most 7.7 %
    in a step and 2.5 % in the mean of all, of which these bounds are twice."""
    assert losses == pytest.approx(wide, rel=0.15)
    assert fmean(losses) == pytest.approx(fmean(wide), rel=0.05)
