"""scripts/mlperf_train.sh at toy size: from the benchmark's folder of files to a checked log."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import parse_qsl

import pytest

pytest.importorskip("h5py")
pytest.importorskip("mlperf_logging")

from safetensors.torch import load_file

from tests.support.mlperf_files import BATCH, read_log, write_benchmark
from tests.support.paths import ROOT
from tests.support.processes import TIMEOUT

SETTINGS = {
    "device": "cpu",
    "cuda_graphs": "false",
    "rank_timeout": str(TIMEOUT),
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


def _write_stand_ins(folder: Path) -> dict[str, str]:
    """Empty files of a benchmark, and a Python that only notes how it is called, in `calls`."""
    files = folder / "files"
    for name in ("train", "a+b&c%d", "tf1_ckpt"):
        (files / name).mkdir(parents=True)
    for name in ("vocab.txt", "bert_config.json", "tf1_ckpt/model.ckpt-28252.index"):
        (files / name).touch()
    python = folder / "python"
    python.write_text(f'#!/bin/sh\necho "$*" >> {folder}/calls\n')
    python.chmod(0o755)
    return {"python": str(python)}


STAND_INS = ["files", "out", "--ranks", "1", "--eval", "files/a+b&c%d", "--keep-caches"]


def _trained(folder: Path) -> list[str]:
    """The arguments of each training so far."""
    return [x for x in (folder / "calls").read_text().splitlines() if "pretrain.py" in x]


def test_a_log_without_its_end_is_made_again(tmp_path):
    stand_ins = _write_stand_ins(tmp_path)
    logs = [tmp_path / "out" / f"result_{number}.txt" for number in (0, 1)]
    (tmp_path / "out").mkdir()
    logs[0].write_text(':::MLLOG {"key": "run_start"}\n')
    logs[1].write_text(':::MLLOG {"key": "run_stop"}\n')
    done = _run(tmp_path, *STAND_INS, "--runs", "2", **stand_ins)
    assert done.returncode == 0, done.stdout + done.stderr
    (trained,) = _trained(tmp_path)
    assert f"--logging.mlperf {logs[0]}" in trained
    assert "--resume never" in trained
    assert "run_start" in (tmp_path / "out" / "result_0.txt.partial").read_text()
    assert f"there already: {logs[1]}" in done.stdout
    shards = tmp_path / "out" / "shards"
    assert f"--data.source shards:{shards} " in trained
    # Of a path, a source decodes what follows the question mark.
    calls = (tmp_path / "calls").read_text()
    source = re.search(rf"bert_unpad.data import (\S+) {shards} --vocab-file", calls).group(1)
    _, _, query = source.partition("?")
    assert dict(parse_qsl(query)) == {"validation": str(tmp_path / "files" / "a+b&c%d")}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.hdf5", "hdf5"), ("output_00000", "hdf5"), ("part-00000-of-00500", "tfrecord")],
)
def test_the_format_follows_from_the_names_of_the_files(tmp_path, name, kind):
    stand_ins = _write_stand_ins(tmp_path)
    (tmp_path / "files" / "train" / name).touch()
    assert _run(tmp_path, *STAND_INS, **stand_ins).returncode == 0
    imported = f"bert_unpad.data import {kind}:{tmp_path / 'files' / 'train'}?"
    assert imported in (tmp_path / "calls").read_text()


def test_a_checkpoint_that_was_half_converted_is_converted_again(tmp_path):
    stand_ins = _write_stand_ins(tmp_path)
    (tmp_path / "out" / "checkpoint.partial").mkdir(parents=True)
    for _ in range(2):
        assert _run(tmp_path, *STAND_INS, **stand_ins).returncode == 0
    converted = [x for x in (tmp_path / "calls").read_text().splitlines() if ".convert" in x]
    assert len(converted) == 1
    assert f"--model.preset {tmp_path / 'out' / 'checkpoint'} " in _trained(tmp_path)[-1]


@pytest.mark.parametrize(
    "change",
    [
        ["--batch", "256"],
        ["--checkpoint", "files/other"],
        ["--train", "files/tf1_ckpt"],
        ["--", "--batching.accumulation", "4"],
        "touch files/tf1_ckpt/model.ckpt-28252.index",
        "echo x > files/bert_config.json",
    ],
)
def test_runs_that_differ_are_not_mixed(tmp_path, change):
    stand_ins = _write_stand_ins(tmp_path)
    (tmp_path / "files" / "other.pt").touch()
    assert _run(tmp_path, *STAND_INS, **stand_ins).returncode == 0
    if isinstance(change, str):
        subprocess.run(change, cwd=tmp_path, shell=True, check=True)
        change = []
    done = _run(tmp_path, *STAND_INS, *change, **stand_ins)
    assert done.returncode == 2
    assert "OUTPUT: expected a folder of runs with the same settings and files" in done.stderr
    assert len(_trained(tmp_path)) == 1
    done = _run(tmp_path, "files", "new", *STAND_INS[2:], *change, **stand_ins)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_checkpoint_that_is_not_there_is_named(tmp_path):
    stand_ins = _write_stand_ins(tmp_path)
    done = _run(tmp_path, *STAND_INS, "--checkpoint", "files/lost", **stand_ins)
    assert done.returncode == 2
    assert f"--checkpoint: expected {tmp_path}/files/lost, got none" in done.stderr
    assert not (tmp_path / "out").exists()


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
