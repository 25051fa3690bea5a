"""The report of scripts/gpu_check.sh: parts run on their own add to it."""

import json
import os
import re
import shutil
import subprocess

import pytest

from benchmarks import gpu_report, ops
from tests.support.paths import ROOT


@pytest.fixture
def report(monkeypatch):
    return gpu_report


def run(report, monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_report.py", "--device", "some-gpu", *arguments])
    report.main()


def test_steps_of_other_parts_stay(report, monkeypatch, tmp_path):
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "git", lambda *arguments: "abc")
    logs = ["--logs", str(tmp_path)]
    xml = '<testsuites><testsuite tests="7" failures="1" errors="0" skipped="2"/></testsuites>'
    (tmp_path / "tests.xml").write_text(xml)
    run(report, monkeypatch, "build", "--status", "0", "--seconds", "9", *logs)
    run(report, monkeypatch, "tests", "--status", "1", "--seconds", "3", *logs)
    run(report, monkeypatch, "memcheck", "--missing", "no tool", *logs)
    found = json.loads((tmp_path / "benchmarks/results/some-gpu/gpu_check.json").read_text())
    steps = found["steps"]
    assert (steps["build"]["ok"], steps["build"]["seconds"]) == (True, 9)
    assert (steps["tests"]["ok"], steps["tests"]["tests"], steps["tests"]["failures"]) == (
        False,
        7,
        1,
    )
    assert (steps["memcheck"]["ok"], steps["memcheck"]["not_run"]) == (False, "no tool")
    assert all(step["commit"] == "abc" and step["date"] for step in steps.values())
    assert found["info"]["versions"]["torch"]
    run(report, monkeypatch, "tests", "--status", "0", "--seconds", "3", *logs)
    found = json.loads((tmp_path / "benchmarks/results/some-gpu/gpu_check.json").read_text())
    assert found["steps"]["tests"]["ok"]
    assert found["steps"].keys() == {"build", "tests", "memcheck"}


PYTHON = """#!/usr/bin/env bash
case "$*" in
  "-m benchmarks.lib.device") echo some-gpu ;;
  "-m benchmarks.gpu_report "*) echo "report ${*: -5}" >>"$CALLS" ;;
  *)
    echo "$*" >>"$CALLS"
    [[ "$*" != *test_loss.py* ]] || exit "${STATUS:-1}"
    ;;
esac
"""


@pytest.fixture
def check(tmp_path):
    """Runs a copy of the script with a Python that only notes its calls, of which test_loss.py
    fails; returns what came of it and the calls."""
    for folder in ("scripts", "tests/cuda"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "scripts/gpu_check.sh", tmp_path / "scripts")
    texts = {"loss": "def test_", "loss_sums": "mark.sanitizer def test_", "no": ""}
    for name, text in texts.items():
        (tmp_path / f"tests/cuda/test_{name}.py").write_text(text)
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)

    def run(*parts: str, **settings: str):
        calls = tmp_path / "calls"
        calls.write_text("")
        command = ["bash", str(tmp_path / "scripts/gpu_check.sh"), *parts]
        env = os.environ | {"PYTHON": str(python), "CALLS": str(calls)} | settings
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        return done, calls.read_text().splitlines()

    return run


def test_a_part_that_fails_does_not_keep_others_from_running(check):
    done, calls = check("tests", "benchmarks_gelu")
    assert done.returncode == 1
    commands, reports = (
        [c for c in calls if c.startswith("report") == is_report] for is_report in (False, True)
    )
    xml = "-m pytest -rs -m gpu --junitxml=build/gpu_check/tests_"
    assert commands == [
        f"{xml}loss.xml tests/cuda/test_loss.py",
        f"{xml}loss_sums.xml tests/cuda/test_loss_sums.py",
        "-m benchmarks.ops --device cuda --op gelu",
    ]
    assert [re.sub(r"\d+$", "N", r) for r in reports] == [
        "report tests_loss --status 1 --seconds N",
        "report tests_loss_sums --status 0 --seconds N",
        "report benchmarks_gelu --status 0 --seconds N",
    ]


def test_tests_that_cannot_run_are_no_success(check):
    done, calls = check("tests_loss", STATUS="5")
    assert done.returncode == 1
    assert "tests_loss: no test could run" in done.stderr
    assert "report tests_loss --status 5" in calls[1]


def test_one_part_of_a_kind(check):
    done, calls = check("tests_loss_sums")
    assert done.returncode == 0
    assert len(calls) == 2


def test_parts_that_there_is_no_time_for_are_named(check):
    done, calls = check("tests_loss", "benchmarks_model", TOTAL="20")
    assert (done.returncode, calls) == (1, [])
    assert "no time left for tests_loss\n" in done.stderr
    assert "no time left for benchmarks_model\n" in done.stderr


def test_the_sanitizer_is_asked_for_kernels_only(check, tmp_path):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text('#!/bin/sh\necho "tool $*" >>"$CALLS"\n')
    tool.chmod(0o755)
    done, calls = check("racecheck", COMPUTE_SANITIZER=str(tool))
    assert done.returncode == 0
    assert calls[0].startswith(
        "tool --tool racecheck --error-exitcode 1 --kernel-name kns=bert_unp"
    )
    assert calls[1].startswith("report racecheck_loss_sums --status 0")
    assert calls[0].endswith("/python -m pytest -rs -m gpu and sanitizer "
                             "--junitxml=build/gpu_check/racecheck_loss_sums.xml "
                             "-x tests/cuda/test_loss_sums.py")  # fmt: skip


def test_parts_are_checked_before_anything_runs():
    command = ["bash", str(ROOT / "scripts/gpu_check.sh"), "tests", "speed"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    said, _, listed = done.stderr.partition("; parts: ")
    assert said == "gpu_check: unknown part 'speed'"
    parts = set(listed.split())
    assert {f"tests_{path.stem[5:]}" for path in (ROOT / "tests/cuda").glob("test_*.py")} <= parts
    assert {f"benchmarks_{op}" for op in ("attention", *ops.CUDA_CASES)} <= parts
