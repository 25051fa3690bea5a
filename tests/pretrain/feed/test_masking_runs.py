"""Whole runs whose masking rate falls: the same masks on any number of ranks, and resumed."""

import shutil
from pathlib import Path

import pytest
import torch

from bert_unpad.pretrain.config import ConfigError, read_config
from tests.support.pretrain_runs import log_lines, losses, make_folder, run_in_turn

STEPS = 20
COMMON = (
    *("--data.masked_lm_prob", "[0.5, 0.1]", "--data.mask_unit", "span"),
    *("--schedule.epochs", "null", "--schedule.total_steps", str(STEPS)),
    *("--model.hidden_dropout_prob", "0", "--model.attention_probs_dropout_prob", "0"),
    *("--checkpoint.every", "5", "--checkpoint.keep_last", "9"),
)
RUNS = {
    "random": ["--batching.strategy", "random"],
    "exchange": ["--batching.strategy", "exchange"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("masking")
    make_folder(path)
    run_in_turn(path, 2, RUNS, COMMON)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_the_rate_falls_over_the_run(folder, name):
    shares = [line["masked_share"] for line in log_lines(folder / name)]
    wanted = [0.5 - 0.4 * step / STEPS for step in range(STEPS)]
    # Each example's number of predictions is rounded.
    assert shares == pytest.approx(wanted, abs=0.03)


@pytest.mark.slow
def test_masks_are_the_same_on_other_ranks(folder):
    run_in_turn(folder, 1, {"alone": RUNS["random"]}, COMMON)
    alone, both = (log_lines(folder / name) for name in ("alone", "random"))
    assert [x["masked_share"] for x in alone] == [x["masked_share"] for x in both]
    ours, theirs = (torch.tensor([x["mlm_loss"] for x in lines]) for lines in (alone, both))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    held_out = [
        log_lines(folder / name, "evaluation")[-1]["mlm_loss"] for name in ("alone", "random")
    ]
    assert held_out[0] == pytest.approx(held_out[1], abs=1e-4)


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_masks(folder):
    for name in RUNS:
        shutil.copytree(folder / name, folder / f"{name}_resumed")
        (folder / f"{name}_resumed" / "summary.json").unlink()
        for checkpoint in (folder / f"{name}_resumed" / "checkpoints").glob("step-*"):
            if not checkpoint.name.endswith("10"):
                shutil.rmtree(checkpoint)
    run_in_turn(folder, 2, {f"{name}_resumed": more for name, more in RUNS.items()}, COMMON)
    for name in RUNS:
        assert losses(folder / f"{name}_resumed") == losses(folder / name)


BASE = ["--batching.global_batch_size", "8", "--schedule.total_steps", "9"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--data.masked_lm_prob", "[0.3]"], "masked_lm_prob: expected a number or a list of 2 n"),
        (["--data.masked_lm_prob", "[0.3, 1.5]"], "masked_lm_prob: expected a share between 0 and"),
        (["--data.masked_lm_prob", "much"], "masked_lm_prob: expected a number or a list of 2"),
        (["--data.mask_unit", "sentence"], "mask_unit: expected one of token, word, span, got"),
    ],
)
def test_settings_that_do_not_fit(given, message):
    with pytest.raises(ConfigError, match=rf"^data\.{message}"):
        read_config([*BASE, *given])
