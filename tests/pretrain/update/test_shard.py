"""Runs whose optimizer's state is shared out among ranks: the same bits, less memory, resuming."""

import shutil
from pathlib import Path

import pytest

from bert_unpad.pretrain.config import ConfigError, read_config
from tests.support.pretrain_runs import log_lines, losses, make_folder, run_in_turn

pytestmark = pytest.mark.slow

BASE = ["--schedule.epochs", "null", "--schedule.total_steps", "6", "--optimizer.lr", "3e-3"]
BASE += ["--checkpoint.every", "3", "--checkpoint.keep_last", "9", "--logging.progress", "none"]
BASE += ["--logging.examples", "false", "--clip.mode", "bucket"]
ADAM, LAMB, ADAMW = (["--optimizer.name", name] for name in ("fused_adam", "lamb", "adamw"))
WORLD, NODE = (["--optimizer.shard", value] for value in ("world", "node"))
RUNS = {
    "adam": ADAM,
    "adam-world": [*ADAM, *WORLD],
    "lamb": LAMB,
    "lamb-node": [*LAMB, *NODE],
    # An overflow in the first update: all ranks leave it out, whoever keeps the state.
    "adamw": [*ADAMW, "--precision", "fp16", "--loss_scale.initial", "1048576"],
}
# Its own max_grad_norm bounds the gradient of all parameters, whoever keeps their state.
BOUND = ["--clip.mode", "none", "--optimizer.arguments", '{"max_grad_norm": 0.05}']
RUNS["bound"] = ["--optimizer.name", "bert_unpad.optim.FusedLAMB", *BOUND]
RUNS["bound-node"] = [*RUNS["bound"], *NODE]
RUNS["adamw-node"] = [*RUNS["adamw"], *NODE]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("shard")
    make_folder(path)
    run_in_turn(path, 4, RUNS, BASE, node_size=2)
    for name in ("adam", "adam-world"):
        for copy in (f"{name}-on-2", f"{name}-on-4"):
            shutil.copytree(path / name, path / copy)
            shutil.rmtree(path / copy / "checkpoints" / "step-000000006")
    return path


def _state_bytes(run_dir: Path) -> list[int]:
    return log_lines(run_dir, "optimizer")[-1]["state_bytes"]


@pytest.mark.parametrize("name", ["adam-world", "lamb-node", "adamw-node"])
def test_updates_are_the_same_bits_and_ranks_keep_less(folder, name):
    plain = name.split("-")[0]
    assert losses(folder / name) == losses(folder / plain)
    skipped = [x["skipped_steps"] for x in log_lines(folder / name)]
    assert (skipped[0], skipped[-1]) == (int(plain == "adamw"), 0)
    whole, shared = _state_bytes(folder / plain), _state_bytes(folder / name)
    assert len(whole) == len(shared) == 4
    assert set(whole) == {whole[0]}
    if name.endswith("node"):
        assert shared[:2] == shared[2:]
        assert sum(shared[:2]) == whole[0]
        assert max(shared) < 0.7 * whole[0]
    else:
        assert sum(shared) == whole[0]
        assert max(shared) < 0.5 * whole[0]


def test_the_norm_of_all_parameters_is_bounded(folder):
    whole, shared = losses(folder / "bound"), losses(folder / "bound-node")
    for step, expected in whole.items():
        assert shared[step] == pytest.approx(expected, rel=1e-6)


def test_a_resumed_run_goes_on_as_one_that_shares_nothing_out(folder):
    run_in_turn(folder, 4, {"adam-world-on-4": RUNS["adam-world"]}, BASE, node_size=2)
    assert losses(folder / "adam-world-on-4") == losses(folder / "adam")


def test_checkpoints_fit_other_numbers_of_ranks_and_runs_that_share_nothing_out(folder):
    runs = {
        "adam-on-2": ADAM,  # neither run shares anything out
        "adam-world-on-2": RUNS["adam-world"],  # both do
        "adam-on-4": RUNS["adam-world"],  # only the second does
    }
    run_in_turn(folder, 2, runs, BASE)
    want = losses(folder / "adam-on-2")
    assert losses(folder / "adam-world-on-2") == want
    assert losses(folder / "adam-on-4") == want
    assert len(_state_bytes(folder / "adam-on-4")) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["--comm.hook", "post_local_sgd"], "expected none with comm.hook post_local_sgd"),
        (["--growth.name", "stacking"], "expected none with growth.name stacking"),
    ],
)
def test_settings_that_do_not_go_together(settings, message):
    needed = ["--batching.global_batch_size", "8", "--schedule.total_steps", "3"]
    with pytest.raises(ConfigError, match=f"optimizer.shard: {message}"):
        read_config([*needed, *settings, *NODE])
