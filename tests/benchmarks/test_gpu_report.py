"""The report of scripts/gpu_check.sh: parts run on their own add to it."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from benchmarks import gpu_report, ops
from benchmarks.lib import dry_run
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
    assert (steps["memcheck"]["ok"], steps["memcheck"]["not_run"]) == (None, "no tool")
    assert all(step["commit"] == "abc" and step["date"] for step in steps.values())
    assert found["info"]["versions"]["torch"]
    run(report, monkeypatch, "tests", "--status", "0", "--seconds", "3", *logs)
    found = json.loads((tmp_path / "benchmarks/results/some-gpu/gpu_check.json").read_text())
    assert found["steps"]["tests"]["ok"]
    assert found["steps"].keys() == {"build", "tests", "memcheck"}


PYTHON = """#!/usr/bin/env bash
case "$*" in
  "-m benchmarks.lib.device") [ -n "${NO_GPU:-}" ] || echo some-gpu ;;
  "-m benchmarks.gpu_report "*) echo "report ${*:7}" >>"$CALLS" ;;
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
    for folder in ("scripts", "tests/cuda", "tests/ops"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "scripts/gpu_check.sh", tmp_path / "scripts")
    both = "mark.sanitizer def test_(backend: Backend)"
    texts = {"cuda/test_loss": "def test_", "ops/test_loss": "def test_", "cuda/test_no": ""}
    texts |= dict.fromkeys(["cuda/test_loss_sums", "ops/test_norm", "cuda/test_norm"], both)
    for name, text in texts.items():
        (tmp_path / f"tests/{name}.py").write_text(text)
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
    done, calls = check("tests", "tests_loss_sums", "large", "benchmarks_gelu")
    assert done.returncode == 1
    commands, reports = (
        [c for c in calls if c.startswith("report") == is_report] for is_report in (False, True)
    )
    *spread, benchmark = commands
    assert benchmark == "-m benchmarks.ops --device cuda --op gelu"
    # Other tests than the large ones by several processes; what others stand on comes first.
    patterns = [
        r"-m gpu and not large --junitxml=\S+/tests.xml -n \d+ .* tests/cuda/test_norm.py "
        "tests/ops/test_norm.py tests/cuda/test_loss.py tests/ops/test_loss.py "
        "tests/cuda/test_loss_sums.py",
        r"-m gpu and not large --junitxml=\S+/tests_loss_sums.xml -n \d+ .* "
        "tests/cuda/test_loss_sums.py",
        r"-m gpu and large --junitxml=\S+/large.xml -n 1 .* tests/cuda tests/ops",
    ]
    for command, pattern in zip(spread, patterns, strict=True):
        assert re.fullmatch(f"-m pytest -rs {pattern}", command)
    assert [re.sub(r"\d+$", "N", r) for r in reports] == [
        "report tests --status 1 --seconds N",
        "report tests_loss_sums --status 0 --seconds N",
        "report large --status 0 --seconds N",
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
    done, calls = check("racecheck_loss_sums", COMPUTE_SANITIZER=str(tool))
    assert done.returncode == 0
    assert calls[0].startswith(
        "tool --tool racecheck --error-exitcode 1 --kernel-name kns=bert_unp"
    )
    assert calls[1].startswith("report racecheck_loss_sums --status 0")
    assert calls[0].endswith("/python -m pytest -rs -m gpu and sanitizer "
                             "--junitxml=build/gpu_check/racecheck_loss_sums.xml "
                             "-x tests/cuda/test_loss_sums.py")  # fmt: skip


def test_a_sanitizer_that_refuses_the_device_is_no_failure(check, tmp_path):
    """It is asked once, and the report says why nothing was looked at."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text('#!/bin/sh\necho "tool" >>"$CALLS"\necho "==== Device not supported"\nexit 9\n')
    tool.chmod(0o755)
    done, calls = check("memcheck", COMPUTE_SANITIZER=str(tool))
    assert done.returncode == 0
    reports = [
        f"report memcheck_{name} --missing compute-sanitizer: Device not supported"
        for name in ("loss_sums", "norm")
    ]
    assert calls == ["tool", *reports]
    assert "memcheck_norm was not run: compute-sanitizer: Device not supported" in done.stderr


def test_a_dry_run_runs_nothing(check):
    done, calls = check("--dry", "tests_loss", "benchmarks_gelu", NO_GPU="1", STATUS="1")
    assert done.returncode == 1  # that of the first
    for call, end in zip(calls, ("pytest -rs ", "benchmarks.ops --device cuda"), strict=True):
        assert re.match(rf"-m benchmarks.lib.dry_run \S+/python -m {end}", call)
    done, calls = check("tests_loss", NO_GPU="1")
    assert (done.returncode, calls) == (2, [])


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder of benchmarks and tests of which one lacks a package that it imports late."""
    files = {
        "benchmarks/fine.py": "import json\nfrom benchmarks.lib import late",
        "benchmarks/lib/late.py": "def f():\n    import no_such_package.part",
        "benchmarks/broken.py": "import no_other_package",
        "benchmarks/alone.py": "import json",
        "tests/test_skipped.py": "import pytest\npytest.importorskip('no_third_package')",
        "tests/test_fine.py": "import json\ndef test_f(): raise ValueError",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(dry_run, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("benchmarks.alone", []),
        ("benchmarks.fine", ["benchmarks/lib/late.py needs no_such_package"]),
        ("benchmarks.broken", ["No module named 'no_other_package'", "broken.py needs no_other_p"]),
        ("pytest -q tests/test_fine.py", []),
        (
            "pytest -q tests/test_skipped.py tests/test_fine.py",
            ["could not import 'no_third_package'", "test_skipped.py needs no_third_package"],
        ),
        ("pytest -q --no-such-option tests/test_fine.py", ["--no-such-option"]),
    ],
)
def test_what_is_missing_is_named(command, found, checkout):
    problems = dry_run.problems([sys.executable, "-m", *command.split()])
    assert len(problems) == len(found), problems
    assert all(part in problem for part, problem in zip(found, problems, strict=True))


def test_parts_are_checked_before_anything_runs():
    command = ["bash", str(ROOT / "scripts/gpu_check.sh"), "tests", "speed"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    said, _, listed = done.stderr.partition("; parts: ")
    assert said == "gpu_check: unknown part 'speed'"
    parts = set(listed.split())
    paths = (*(ROOT / "tests/cuda").glob("test_*.py"), ROOT / "tests/ops/test_glu.py")
    assert {f"tests_{path.stem[5:]}" for path in paths} <= parts
    assert {f"benchmarks_{op}" for op in ("attention", *ops.CUDA_CASES)} <= parts
