"""What MLPerf's rules for BERT ask of the options of a run."""

import pytest

from bert_unpad.pretrain.config import ConfigError, read_config
from bert_unpad.pretrain.config.mlperf import evaluation_interval
from tests.support.paths import CONFIGS

RECIPE = ["--config", str(CONFIGS / "bert_large_mlperf.yaml")]


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        # The examples in the README of the benchmark's reference.
        *((256, 150_000), (1024, 150_000), (1536, 150_000), (2048, 150_000)),
        *((3072, 175_000), (4096, 175_000)),
        # By the formula alone.
        *((448, 150_000), (16384, 325_000)),
    ],
)
def test_evaluations_are_as_far_apart_as_the_rules_say(batch, samples):
    assert evaluation_interval(batch) == samples
    config, _ = read_config([*RECIPE, "--batching.global_batch_size", str(batch)])
    updates = config.evaluation.updates_between(batch)
    assert samples <= updates * batch < samples + batch


@pytest.mark.parametrize(("given", "updates"), [("1", 1), ("10", 1), ("11", 2), ("null", 335)])
def test_samples_are_rounded_up_to_updates(given, updates):
    more = ["--evaluation.every_samples", given, "--evaluation.every", "335"]
    config, _ = read_config([*RECIPE, *more])
    assert config.evaluation.updates_between(10) == updates


LOG = ["--logging.mlperf", "log.txt"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--evaluation.every_samples", "0"], "evaluation.every_samples: expected a number >= 1, "),
        (["--evaluation.every_samples", "x"], "evaluation.every_samples: expected an integer or "),
        (
            ["--batching.strategy", "packed"],
            "batching.strategy: expected stratified, random or exchange with evaluation.every_",
        ),
        (
            ["--batching.warmup_batch_size", "64", "--batching.warmup_steps", "9"],
            "batching.warmup_batch_size: expected null with evaluation.every_samples",
        ),
        (
            ["--logging.mlperf_submission", '{"cache_clear": true}'],
            "logging.mlperf: expected a file with logging.mlperf_submission, got null",
        ),
        (
            [*LOG, "--logging.mlperf_submission", '{"org": "x"}'],
            "logging.mlperf_submission: expected entries of submission_division, .*, got 'org'",
        ),
        (
            [*LOG, "--logging.mlperf_submission", '{"submission_division": "half"}'],
            "mlperf_submission: expected a submission_division of closed or open, got 'half'",
        ),
        (
            [*LOG, "--evaluation.target_accuracy", "null"],
            "evaluation.target_accuracy: expected a number with logging.mlperf, got null",
        ),
        (
            [*LOG, "--schedule.total_steps", "null", "--schedule.epochs", "1"],
            "schedule.total_steps: expected a number with logging.mlperf, got null",
        ),
        ([*LOG, "--optimizer.name", "adamw"], "optimizer.name: expected lamb in the closed "),
        ([*LOG, "--data.objective", "mlm"], "data.objective: expected mlm_nsp in the closed "),
        ([*LOG, "--schedule.name", "cosine"], "schedule.name: expected polynomial or linear in "),
        ([*LOG, "--schedule.decay_from", "warmup"], "schedule.decay_from: expected start in the "),
        (
            [*LOG, "--growth.name", "layer_drop", "--cuda_graphs", "false"],
            "growth.name: expected none in the closed",
        ),
        (
            [*LOG, "--comm.hook", "power_sgd"],
            "comm.hook: expected allreduce or hierarchical in the closed",
        ),
    ],
)
def test_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        read_config([*RECIPE, *given])


def test_the_open_division_takes_other_optimizers():
    read_config([*RECIPE, *LOG])
    division = ["--logging.mlperf_submission", '{"submission_division": "open"}']
    config, _ = read_config([*RECIPE, *LOG, *division, "--optimizer.name", "adamw"])
    assert config.logging.mlperf_submission == {"submission_division": "open"}
