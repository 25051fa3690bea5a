"""Whole runs with optimizers by their import path, and with Muon: exact resume on two ranks."""

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.pretrain_runs import finish, log_lines, losses, make_folder, run_in_turn, start

pytestmark = pytest.mark.slow

BASE = ["--schedule.epochs", "null", "--schedule.total_steps", "6", "--optimizer.lr", "3e-3"]
BASE += ["--checkpoint.every", "3", "--checkpoint.keep_last", "9", "--logging.progress", "none"]
BASE += ["--logging.examples", "false", "--evaluation.examples", "0"]
MIXED = ["--optimizer.name", "tests.support.optimizers.Mixed"]
# An overflow in the first update, which the host must see.
FP16 = [*MIXED, "--precision", "fp16", "--loss_scale.initial", "1048576"]
GROWS = ["--growth.name", "stacking", "--growth.layers", "[1, 2]", "--growth.shares", "[0.3, 0.7]"]
LOCAL = ["--comm.hook", "post_local_sgd", "--comm.start", "1", "--comm.local_sgd_group", "1"]
RUNS = {
    "sgd": ["--optimizer.name", "torch.optim.SGD", "--optimizer.arguments", '{"momentum": 0.9}'],
    "mixed": FP16,
    "mixed-world": [*FP16, "--optimizer.shard", "world"],
    "mixed-grows": [*MIXED, *GROWS],
    "mixed-local": [*MIXED, *LOCAL, "--comm.local_sgd_period", "2"],
    "merit": ["--optimizer.name", "bert_unpad.experimental.MERIT"],
    "muon": ["--optimizer.name", "muon", "--precision", "fp16", "--loss_scale.initial", "1048576"],
}
if find_spec("pytorch_optimizer"):  # Luo et al., "CAME" (ACL 2023), arXiv:2307.02047
    RUNS["came"] = ["--optimizer.name", "pytorch_optimizer.CAME", "--optimizer.weight_decay", "0.1"]
    RUNS["came"] += ["--optimizer.arguments", '{"betas": [0.9, 0.99, 0.999]}']


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("path")
    make_folder(path)
    run_in_turn(path, 2, RUNS, BASE)
    for name in RUNS:
        shutil.copytree(path / name, path / f"{name}-resumed")
        shutil.rmtree(path / f"{name}-resumed" / "checkpoints" / "step-000000006")
    shutil.copytree(path / "sgd-resumed", path / "another")
    run_in_turn(path, 2, {f"{name}-resumed": more for name, more in RUNS.items()}, BASE)
    return path


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_goes_on_with_the_same_bits(folder, name):
    found = losses(folder / name)
    assert len(found) == 6
    assert found[6] != found[5]
    assert losses(folder / f"{name}-resumed") == found


def test_an_overflow_is_left_out(folder):
    for name in ("mixed", "muon"):
        skipped = [x["skipped_steps"] for x in log_lines(folder / name)]
        assert (skipped[0], skipped[-1]) == (1, 0)


def test_sharing_out_changes_no_bit(folder):
    assert losses(folder / "mixed-world") == losses(folder / "mixed")


def test_the_log_says_that_the_host_waits(folder):
    for name in RUNS:
        line = log_lines(folder / name, "optimizer")[-1]
        assert line["host_waits"] is (name != "muon")
        assert line["state_bytes"][0] > 0
    assert (
        "does not read found_inf: before each update the host waits"
        in (folder / "runs.log.0").read_text()
    )


@pytest.mark.skipif("came" not in RUNS, reason="needs pytorch_optimizer")
def test_came_keeps_little(folder):
    came, merit = (
        log_lines(folder / x, "optimizer")[-1]["state_bytes"][0] for x in ("came", "merit")
    )
    assert came < 0.7 * merit


@pytest.mark.parametrize("name", ["Keeper", "Global"])
def test_a_state_that_no_checkpoint_holds_ends_the_run_after_one_update(folder, name):
    more = ["--optimizer.name", f"tests.support.optimizers.{name}", "--checkpoint.every", "0"]
    codes, output = finish(folder, name, start(folder, name, 1, *BASE, *more))
    assert codes == [2]
    assert "optimizer.name: expected one whose state are tensors" in output
    assert not log_lines(folder / name)


def test_the_state_of_another_optimizer_is_refused(folder):
    for name, kind in (("adamw", "adamw"), ("torch.optim.Adam", "torch.optim.Adam")):
        codes, output = finish(
            folder, "another", start(folder, "another", 1, *BASE, "--optimizer.name", name)
        )
        assert codes == [2]
        assert "optimizer.name: expected one whose state is that of" in output
        assert f"torch.optim.sgd.SGD (or another run_dir), got {kind}" in output
