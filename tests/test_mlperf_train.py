"""scripts/mlperf_train.sh at toy size: from the benchmark's folder of files to a checked log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("h5py")
pytest.importorskip("mlperf_logging")

from safetensors.torch import load_file

from tests.support.mlperf_files import BATCH, read_log, write_benchmark
from tests.support.paths import ROOT
from tests.support.processes import TIMEOUT

SETTINGS = {
    "device": "cpu",
    "precision": "fp32",
    "data.max_seq_length": "24",
    "data.max_predictions_per_seq": "6",
    "optimizer.lr": "0.02",
    "schedule.total_steps": "40",
    "evaluation.every_samples": "24",
}


def _run(
    folder: Path,
    *arguments: str,
    settings: dict[str, str] | None = None,
    python: str = sys.executable,
):
    given = [text for name, value in (settings or {}).items() for text in (f"--{name}", value)]
    command = ["bash", str(ROOT / "scripts" / "mlperf_train.sh"), *arguments]
    return subprocess.run(
        [*command, "--", *given] if given else command,
        cwd=folder,
        env=os.environ
        | {
            "PYTHON": python,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            "OMP_NUM_THREADS": "1",
            "XDG_CACHE_HOME": str(folder / "cache"),
        },
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )


@pytest.mark.slow
def test_from_the_folder_to_a_log_that_passes(tmp_path):
    write_benchmark(tmp_path / "files")
    arguments = ["files", "out", "--batch", str(BATCH), "--ranks", "1", "--org", "a name"]
    arguments += ["--keep-caches"]
    done = _run(tmp_path, *arguments, settings=SETTINGS)
    assert done.returncode == 0, done.stdout + done.stderr
    out = tmp_path / "out"
    found = {key: value for key, value, *_ in read_log(out / "result_0.txt")}
    assert found["submission_org"] == "a name"
    assert found["cache_clear"] is False
    assert found["global_batch_size"] == BATCH
    assert found["eval_accuracy"] >= 0.72
    # The model began with the checkpoint's weights, and with the reference's activation.
    assert json.loads((out / "checkpoint" / "config.json").read_text())["hidden_act"] == "gelu_new"
    start, end = (load_file(out / x / "model.safetensors") for x in ("checkpoint", "run_0/model"))
    name = "bert.embeddings.word_embeddings.weight"
    assert 0 < (start[name] - end[name]).norm() < 0.5 * start[name].norm()
    # A log that is there is not made again, only checked.
    lines = (out / "result_0.txt").read_text().splitlines()
    kept = [line for line in lines if '"key": "opt_lamb_beta_1"' not in line]
    (out / "result_0.txt").write_text("\n".join(kept) + "\n")
    done = _run(tmp_path, *arguments, settings=SETTINGS)
    assert done.returncode == 1
    assert f"there already: {out / 'result_0.txt'}" in done.stdout
    assert "Required EXACTLY_ONE occurrence of 'opt_lamb_beta_1'" in done.stdout + done.stderr


def test_a_log_without_its_end_is_made_again(tmp_path):
    for name in ("train", "eval", "vocab.txt", "bert_config.json"):
        (tmp_path / "files" / name).mkdir(parents=True)
    logs = [tmp_path / "out" / f"result_{number}.txt" for number in (0, 1)]
    (tmp_path / "out").mkdir()
    logs[0].write_text(':::MLLOG {"key": "run_start"}\n')
    logs[1].write_text(':::MLLOG {"key": "run_stop"}\n')
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n')
    python.chmod(0o755)
    arguments = ["files", "out", "--ranks", "1", "--runs", "2", "--keep-caches"]
    done = _run(tmp_path, *arguments, python=str(python))
    assert done.returncode == 0, done.stdout + done.stderr
    (trained,) = [x for x in (tmp_path / "calls").read_text().splitlines() if "pretrain.py" in x]
    assert f"--logging.mlperf {logs[0]}" in trained
    assert "--resume never" in trained
    assert "run_start" in (tmp_path / "out" / "result_0.txt.partial").read_text()
    assert f"there already: {logs[1]}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected FOLDER OUTPUT, got ''"),
        (["files"], "expected FOLDER OUTPUT, got 'files'"),
        (["files", "out", "more"], "got a third name, more"),
        (["files", "out", "--batch", "x"], "--batch: expected a number >= 1, got 'x'"),
        (["files", "out", "--runs", "0"], "--runs: expected a number >= 1, got '0'"),
        (["files", "out", "--quick"], "expected an option of --help, got --quick"),
        (["files", "out", "--org"], "--org: expected a value, got none"),
        (["files", "out", "--batch", "500"], "--batch: expected one of MLPerf's table, "),
        (["nowhere", "out"], "nowhere/train, got none"),
        (["files", "out", "--eval", "lost"], "lost, got none"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, tmp_path):
    folder = tmp_path / "files"
    for name in ("train", "eval"):
        (folder / name).mkdir(parents=True)
    for name in ("vocab.txt", "bert_config.json"):
        (folder / name).touch()
    done = _run(tmp_path, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "out").exists()


def test_help():
    done = _run(ROOT, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: bash scripts/mlperf_train.sh FOLDER OUTPUT")
