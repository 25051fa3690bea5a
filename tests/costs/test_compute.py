"""What a rank computes: fitted, stored and derived costs; the inputs that steps are timed with."""

import json

import numpy as np
import pytest

from bert_unpad.costs.compute import ComputeCost
from bert_unpad.costs.timing import default_batches, random_inputs
from bert_unpad.nn import BertConfig, EncoderConfig
from bert_unpad.nn.config import PRESETS
from bert_unpad.nn.flops import training_flops
from tests.support.cost_models import TINY
from tests.support.seeds import derived


@pytest.mark.parametrize("truth", [(3e-6, 2e-9, 1e-3), (3e-6, 0, 0), (0, 1e-9, 0), (1e-6, 0, 2.0)])
def test_fit_finds_the_coefficients_of_exact_times(truth):
    batches = default_batches(512)
    cost = ComputeCost(*truth)
    found = ComputeCost.fit(batches, [cost.seconds(lengths) for lengths in batches])
    np.testing.assert_allclose(
        (found.linear, found.quadratic, found.fixed), truth, rtol=1e-6, atol=1e-12
    )


def test_fit_is_never_negative_and_close_under_noise():
    rng = np.random.default_rng(derived(0))
    batches = default_batches(512)
    for _ in range(20):
        cost = ComputeCost(2e-6, 3e-10, 1e-4)
        seconds = [cost.seconds(b) * rng.uniform(1, 1.05) for b in batches]
        found = ComputeCost.fit(batches, seconds)
        for lengths in batches:
            assert found.seconds(lengths) == pytest.approx(cost.seconds(lengths), rel=0.06)


def test_fit_refuses_what_it_cannot_use():
    with pytest.raises(ValueError, match="seconds: expected one for each of 3 or more"):
        ComputeCost.fit([[1], [2]], [1.0, 2.0])
    with pytest.raises(ValueError, match="seconds: expected numbers above 0"):
        ComputeCost.fit([[1], [2], [3]], [1.0, 0.0, 2.0])
    with pytest.raises(ValueError, match="linear, quadratic"):
        ComputeCost(0, 0, 1)


def test_cost_files(tmp_path):
    cost = ComputeCost(1.5e-6, 2.5e-9, 1e-3)
    path = tmp_path / "cost.json"
    cost.save(path, machine="here")
    assert ComputeCost.load(path) == cost
    assert json.loads(path.read_text())["machine"] == "here"
    for text in ("no json", "{}", '{"format": "other"}', "[]"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"cost\.json: expected a file of"):
            ComputeCost.load(path)


def test_cost_of_a_rate_is_that_of_the_flops():
    config = BertConfig(**PRESETS["bert-large"])
    cost = ComputeCost.from_rate(config, 1e12)
    lengths = [512, 300, 100, 40]
    assert cost.seconds(lengths) == pytest.approx(training_flops(config, lengths) / 1e12, rel=1e-3)


@pytest.mark.parametrize("name", PRESETS)
def test_cost_is_that_of_each_familys_flops(name):
    config = EncoderConfig(**PRESETS[name])
    cost = ComputeCost.from_rate(config, 1.0, config.max_length)
    for length in range(config.max_length // 8, config.max_length, config.max_length // 8):
        flops = training_flops(config, [length] * 40) - training_flops(config, [length] * 20)
        assert cost.seconds([length] * 20) == pytest.approx(flops, rel=1e-2)


def test_random_inputs_are_a_batch_of_these_lengths():
    inputs = random_inputs(TINY, [20, 7, 1], seed=1)
    assert inputs.batch.lengths.tolist() == [20, 7, 1]
    assert inputs.num_masked == 3 + 1 + 0
    assert int(inputs.input_ids.max()) < TINY.vocab_size
