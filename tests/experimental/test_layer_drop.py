"""Layers that updates leave out at random (layer_drop): how often each takes part."""

import numpy as np
import pytest

from bert_unpad.experimental.layer_drop import keep_probabilities
from bert_unpad.pretrain.config import GrowthConfig
from bert_unpad.pretrain.growth import Setting, make_growth


def test_layers_are_dropped_as_often_as_the_paper_says():
    setting = Setting(seed=5, total_steps=1000, layers=6, max_seq_length=8)
    config = GrowthConfig(name="layer_drop")
    growth = make_growth(config, setting)
    assert growth.active_layers(17) == make_growth(config, setting).active_layers(17)
    chosen = np.array([growth.active_layers(step) for step in range(1000)])
    expected = np.array([keep_probabilities(6, step, 0.5, 0.1) for step in range(1000)])
    assert keep_probabilities(6, 0, 0.5, 0.1) == [1.0] * 6
    assert expected[999] == pytest.approx(1 - np.arange(6) / 6 * 0.5, abs=1e-3)
    assert chosen[:, 0].all()
    # Sums of 1,000 draws: within 4 standard deviations of at most 16.
    assert np.abs(chosen.sum(0) - expected.sum(0)).max() < 64
