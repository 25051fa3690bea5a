"""What ranks get equal shares of: the model's own operations, or measured seconds."""

import logging
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bert_unpad.costs.compute import ComputeCost
from bert_unpad.data.sampling.balanced_sampler import BalancedSampler, efficiency
from bert_unpad.nn import EncoderConfig
from bert_unpad.nn.config import PRESETS
from bert_unpad.nn.flops import training_flops
from bert_unpad.pretrain.config import ConfigError
from bert_unpad.pretrain.feed.strategies import warn_of_variation
from bert_unpad.pretrain.output.metrics import Window
from bert_unpad.pretrain.ranks import Ranks
from bert_unpad.pretrain.stages import sequence_work
from tests.support.seeds import derived

CPU = torch.device("cpu")
ALONE = Ranks(0, 1, CPU, None)
RANKS, BATCH = 8, 16


def _lengths() -> np.ndarray:
    """Few long sequences, as documents are."""
    drawn = np.random.default_rng(derived(0)).uniform(3, 9, 40 * RANKS * BATCH)
    return np.exp(drawn).astype(np.uint16)


def test_ranks_have_equal_operations_of_a_model_with_windows():
    config, lengths = EncoderConfig(**PRESETS["modernbert-base"]), _lengths()
    flops = partial(training_flops, config)
    work = sequence_work(SimpleNamespace(num_flops=flops), None, config.max_length, ALONE)
    samplers = [BalancedSampler(lengths, RANKS, r, BATCH, work=work) for r in range(RANKS)]
    for batches in zip(*samplers, strict=True):
        of_ranks = np.array([[flops(lengths[batch]) for batch in batches]], np.float64)
        assert efficiency(of_ranks)[0] > 0.999


def test_a_file_of_measured_seconds_takes_their_place(tmp_path):
    ComputeCost(3e-6, 2e-9, 0.5).save(tmp_path / "cost.json")
    work = sequence_work(None, str(tmp_path / "cost.json"), 512, ALONE)
    assert (work.linear, work.quadratic) == (3e-6, 2e-9)
    (tmp_path / "other.json").write_text("{}")
    for name in ("other.json", "none.json"):
        with pytest.raises(ConfigError, match=rf"^batching\.cost_file: .*{name}"):
            sequence_work(None, str(tmp_path / name), 512, ALONE)


def test_a_start_warns_of_updates_that_vary(caplog):
    lengths = _lengths()
    for batch in (BATCH, 1):
        with caplog.at_level(logging.WARNING):
            warn_of_variation(BalancedSampler(lengths, RANKS, 0, batch), batch)
        assert len(caplog.records) == (batch == 1)
    assert "varies by 1." in caplog.text
    assert "1 sequences on a rank" in caplog.text


class _Pair(Ranks):
    """Two ranks, of which the other one computes for 1 s in each update."""

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 2:
            tensor[:, 1] = 1.0
        return tensor


def test_the_log_has_the_balance_of_measured_seconds():
    window = Window(_Pair(0, 2, CPU, None))
    window.add_spans([(0.0, 1.0), (2.0, 3.0)])  # 2 s: 0.75 of the greatest on average
    assert window.fold()["measured_efficiency"] == 0.75
    window.add_spans([(0.0, 1.0)])
    assert window.close()["measured_efficiency"] == 1.75
    assert "measured_efficiency" not in window.close()
