"""The report of scripts/gpu_check.sh: parts run on their own add to it."""

import json
import subprocess

import pytest

from benchmarks import gpu_report
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


def test_parts_are_checked_before_anything_runs():
    command = ["bash", str(ROOT / "scripts/gpu_check.sh"), "tests", "speed"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "unknown part 'speed'; parts: build tests memcheck racecheck benchmarks" in done.stderr
