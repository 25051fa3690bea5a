"""The learning-rate schedule."""

from __future__ import annotations

import math

import pytest

from bert_unpad.pretrain.config import ConfigError, ScheduleConfig
from bert_unpad.pretrain.update.schedule import lr_factor, warmup_updates


def test_warmup_then_linear_decay():
    factors = [lr_factor(step, total_steps=10, warmup_steps=4) for step in range(10)]
    assert factors == pytest.approx([1 / 4, 2 / 4, 3 / 4, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])


def test_offset_of_the_mlperf_recipe_for_8192():
    # 600 updates, warm-up of 287 that began 76 updates before the run: full rate at update 211.
    factor = [
        lr_factor(step, total_steps=600, warmup_steps=287, start_warmup_step=-76)
        for step in range(600)
    ]
    assert factor[0] == pytest.approx(77 / 287)
    assert factor[209] == pytest.approx(286 / 287)
    assert factor[210] == factor[211] == 1
    assert factor[212] == pytest.approx(1 - 1 / 389)
    assert factor[599] == pytest.approx(1 / 389)


def test_power_and_end():
    quadratic = lr_factor(5, total_steps=10, power=2.0)
    assert quadratic == pytest.approx(0.25)
    assert lr_factor(5, total_steps=10, power=2.0, end_share=0.2) == pytest.approx(0.2 + 0.8 / 4)
    beyond = lr_factor(99, total_steps=10, end_share=0.1)
    assert beyond == pytest.approx(0.1)
    assert all(math.isfinite(lr_factor(s, total_steps=1, warmup_steps=1)) for s in range(3))


def test_warmup_as_a_share():
    assert warmup_updates(ScheduleConfig(warmup_share=0.1), 200) == 20
    assert warmup_updates(ScheduleConfig(warmup_steps=7), 200) == 7
    assert warmup_updates(ScheduleConfig(), 200) == 0
    with pytest.raises(ConfigError, match="warmup_steps"):
        warmup_updates(ScheduleConfig(warmup_steps=300), 200)
    assert warmup_updates(ScheduleConfig(warmup_steps=300, start_warmup_step=-100), 200) == 300
