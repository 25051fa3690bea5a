"""The learning-rate schedule."""

import math
import re
import typing

import pytest

from bert_unpad.pretrain.config import ConfigError, ScheduleConfig, read_config
from bert_unpad.pretrain.growth import Growth, Stage
from bert_unpad.pretrain.growth.stage import staged_lr_factor
from bert_unpad.pretrain.update.schedule import _SHAPES, lr_factor, warmup_updates
from tests.support.paths import CONFIGS, ROOT

BASE = ["--batching.global_batch_size", "8", "--schedule.total_steps", "100"]


def _factors(total: int, warmup: int = 0, **options) -> list[float]:
    schedule = ScheduleConfig(**options)
    return [lr_factor(n, schedule, total_steps=total, warmup_steps=warmup) for n in range(total)]


@pytest.mark.parametrize("name", ["polynomial", "linear"])
def test_warmup_then_linear_decay(name):
    factors = _factors(10, 4, name=name)
    assert factors == pytest.approx([1 / 4, 2 / 4, 3 / 4, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])


def test_a_warmup_that_began_before_the_run():
    # 600 updates, warm-up of 287 that began 76 updates before the run: full rate at update 211.
    factor = _factors(600, 287, start_warmup_step=-76)
    assert factor[0] == pytest.approx(77 / 287)
    assert factor[209] == pytest.approx(286 / 287)
    assert factor[210] == factor[211] == 1
    assert factor[212] == pytest.approx(1 - 1 / 389)
    assert factor[599] == pytest.approx(1 / 389)


def _reference_rates(
    lr: float, steps: int, warmup: int, start: int, power: float = 1.0
) -> list[float]:
    """MLPerf's reference: the decay at every update, and where the warm-up is, that instead."""
    rates = []
    for made in range(steps):  # tf.train.get_or_create_global_step() is read before the update
        rate = lr * (1 - min(made, steps) / steps) ** power
        if warmup and made - start < warmup:
            rate = lr * (made - start) / warmup
        rates.append(rate)
    return rates


@pytest.mark.parametrize("batch", ["256", "448", "1536", "3072", "4096", "8192", "16384"])
@pytest.mark.parametrize("power", [1.0, 0.5])
def test_rates_of_the_mlperf_reference(batch, power):
    script = (ROOT / "scripts" / "mlperf_train.sh").read_text()
    numbers = re.search(rf"^  {batch}\) row (.*) ;;$", script, re.M).group(1).split()
    lr, steps, warmup, start = float(numbers[0]), *map(int, numbers[1:4])
    config, _ = read_config(
        [
            *("--config", str(CONFIGS / "bert_large_mlperf.yaml"), "--optimizer.lr", numbers[0]),
            *("--schedule.total_steps", numbers[1], "--schedule.warmup_steps", numbers[2]),
            *("--schedule.start_warmup_step", numbers[3], "--schedule.power", str(power)),
        ]
    )
    growth = Growth((Stage(steps, 4, 8),), "continue")
    rates = [
        config.optimizer.lr
        * staged_lr_factor(
            made, config.schedule, growth, steps, warmup_updates(config.schedule, steps)
        )
        for made in range(steps)
    ]
    assert rates == pytest.approx(_reference_rates(lr, steps, warmup, start, power), rel=1e-12)


def test_a_decay_from_the_start_of_other_shapes():
    linear = _factors(8, 4, name="linear", decay_from="start", end_lr_share=0.2)
    assert linear[:4] == pytest.approx([0, 1 / 4, 2 / 4, 3 / 4])
    assert linear[4:] == pytest.approx([0.2 + 0.8 * (1 - n / 8) for n in range(4, 8)])
    cosine = _factors(8, 2, name="cosine", decay_from="start")
    assert cosine[2:] == pytest.approx([(1 + math.cos(math.pi * n / 8)) / 2 for n in range(2, 8)])
    assert _factors(8, decay_from="start") == _factors(8)


def test_power_and_end():
    assert _factors(10, power=2.0)[5] == pytest.approx(0.25)
    assert _factors(10, power=2.0, end_lr_share=0.2)[5] == pytest.approx(0.2 + 0.8 / 4)
    beyond = lr_factor(99, ScheduleConfig(end_lr_share=0.1), total_steps=10)
    assert beyond == pytest.approx(0.1)


def test_other_shapes():
    cosine = _factors(12, 4, name="cosine", end_lr_share=0.5)
    expected = [0.5 + 0.25 * (1 + math.cos(math.pi * i / 8)) for i in range(8)]
    assert cosine[4:] == pytest.approx(expected)
    assert _factors(12, 4, name="constant") == [0.25, 0.5, 0.75, *[1.0] * 9]
    assert _factors(12, name="constant") == [1.0] * 12
    inverse = _factors(100, 16, name="inverse_sqrt")
    assert inverse[15] == 1  # update 16 is the last of the warm-up
    assert inverse[16:] == pytest.approx([math.sqrt(16 / n) for n in range(17, 101)])
    assert _factors(9, name="inverse_sqrt") == pytest.approx([n**-0.5 for n in range(1, 10)])
    stable = _factors(100, 10, name="wsd", decay_share=0.2, end_lr_share=0.25)
    assert stable[10:81] == [1.0] * 71
    expected = [0.25 + 0.75 * (1 - math.sqrt(i / 20)) for i in range(20)]
    assert stable[80:] == pytest.approx(expected)


def test_a_stable_decay_may_fill_the_run():
    assert _factors(10, 4, name="wsd", decay_share=1.0)[3:6] == pytest.approx(
        [1, 1, 1 - math.sqrt(1 / 6)]
    )
    assert _factors(10, name="wsd", decay_share=0.0) == [1.0] * 10


NAMES = typing.get_args(typing.get_type_hints(ScheduleConfig)["name"])


def test_every_shape_says_which_options_it_reads():
    assert set(NAMES) == _SHAPES.keys()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("total", "warmup", "start"), [(1, 1, 0), (1, 0, 0), (7, 9, -3), (7, 3, 2)]
)
def test_all_shapes_stay_between_zero_and_the_peak(name, total, warmup, start):
    factors = _factors(total, warmup, name=name, start_warmup_step=start)
    factors += [lr_factor(total + 5, ScheduleConfig(name=name), total_steps=total)]
    assert all(0 <= factor <= 1 for factor in factors)
    after = factors[max(warmup + start, 0) : total]
    assert after == sorted(after, reverse=True)


@pytest.mark.parametrize("name", NAMES)
def test_stages_may_restart_or_rewarm_any_shape(name):
    schedule = ScheduleConfig(name=name)
    stages = (Stage(40, 2, 8), Stage(100, 4, 8))

    def staged(mode: str) -> list[float]:
        growth = Growth(stages, mode)
        return [staged_lr_factor(step, schedule, growth, 100, 10) for step in range(100)]

    plain = _factors(100, 10, name=name)
    assert staged("continue") == plain
    assert staged("restart") == _factors(40, 4, name=name) + _factors(60, 6, name=name)
    assert staged("rewarm")[40:] == [
        min((i + 1) / 6, 1.0) * factor for i, factor in enumerate(plain[40:])
    ]


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("linear", "power"),
        ("cosine", "decay_share"),
        ("constant", "end_lr_share"),
        ("inverse_sqrt", "end_lr_share"),
        ("wsd", "power"),
        ("polynomial", "decay_share"),
    ],
)
def test_options_that_a_shape_does_not_read(name, option):
    given = [*BASE, "--schedule.name", name, f"--schedule.{option}", "0.5"]
    message = rf"^schedule\.{option}: expected .* with schedule.name {name}, which does not read it"
    with pytest.raises(ConfigError, match=message):
        read_config(given)


@pytest.mark.parametrize("name", ["constant", "inverse_sqrt", "wsd"])
def test_shapes_whose_decay_does_not_begin_at_the_start(name):
    message = "schedule.decay_from: expected warmup with schedule.name .*, which does not read it"
    with pytest.raises(ConfigError, match=message):
        read_config([*BASE, "--schedule.name", name, "--schedule.decay_from", "start"])


def test_names_and_ranges():
    with pytest.raises(ConfigError, match=r"schedule\.name: expected one of polynomial, linear, "):
        read_config([*BASE, "--schedule.name", "step"])
    with pytest.raises(ConfigError, match=r"schedule\.decay_share: expected a number in 0 .. 1"):
        read_config([*BASE, "--schedule.name", "wsd", "--schedule.decay_share", "1.5"])


def test_warmup_as_a_share():
    assert warmup_updates(ScheduleConfig(warmup_share=0.1), 200) == 20
    assert warmup_updates(ScheduleConfig(warmup_steps=7), 200) == 7
    assert warmup_updates(ScheduleConfig(), 200) == 0
    with pytest.raises(ConfigError, match="warmup_steps"):
        warmup_updates(ScheduleConfig(warmup_steps=300), 200)
    assert warmup_updates(ScheduleConfig(warmup_steps=300, start_warmup_step=-100), 200) == 300


def test_a_start_without_a_warmup():
    assert _factors(10, start_warmup_step=2)[:2] == [0.0, 0.0]
