"""Commands whose output nobody reads."""

import os
import re
import subprocess
import sys

import pytest

from bert_unpad._closed_pipe import STATUS
from tests.support.paths import ROOT
from tests.support.processes import TIMEOUT

COMMANDS = sorted(
    ".".join(path.relative_to(ROOT).parts[:-1])
    for path in (ROOT / "bert_unpad").rglob("__main__.py")
)


def unread(*arguments: str) -> tuple[int, str]:
    """Status and stderr of a Python whose stdout is a pipe without a reader."""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env=buffered,
    )
    process.stdout.close()
    with process.stderr:
        said = process.stderr.read().decode()
    return process.wait(TIMEOUT), said


@pytest.mark.parametrize("arguments", [["info"], ["info", "--json"], ["data", "--help"]])
def test_a_command_ends_quietly(arguments) -> None:
    assert unread("-m", f"bert_unpad.{arguments[0]}", *arguments[1:]) == (STATUS, "")


@pytest.mark.parametrize("command", COMMANDS)
def test_all_commands_do(command) -> None:
    text = (ROOT / command.replace(".", "/") / "__main__.py").read_text()
    assert "    run_main(main)" in text or text.rstrip().endswith("\nrun_main(main)")


def test_console_scripts_do() -> None:
    table = (ROOT / "pyproject.toml").read_text().split("[project.scripts]\n")[1].split("\n\n")[0]
    for name, module, function in re.findall(r'^(\S+) = "(\S+):(\S+)"$', table, re.M):
        code = f"import sys, {module} as m; sys.argv = [{name!r}, '--print_config']; m.{function}()"
        assert unread("-c", code) == (STATUS, "")


MAIN = """
import argparse, os, sys
from bert_unpad._closed_pipe import run_main
from bert_unpad._commands import run_command
def other_pipe(*_):
    read, write = os.pipe()
    os.close(read)
    os.write(write, b"x")
"""


@pytest.mark.parametrize(
    ("main", "status", "message"),
    [
        ("lambda: print('x' * 100_000) or 0", STATUS, ""),
        ("lambda: print('x') or 0", STATUS, ""),
        ("lambda: print('x') or 3", 3, ""),
        ("lambda: print('x') or sys.exit('what went wrong')", 1, "what went wrong\n"),
        ("lambda: print('x') or 1 / 0", None, "ZeroDivisionError: division by zero"),
        (
            "lambda: run_command(argparse.ArgumentParser(),"
            " argparse.Namespace(run=lambda _: print('x' * 100_000)))",
            STATUS,
            "",
        ),
    ],
)
def test_errors_are_shown_all_the_same(main, status, message) -> None:
    found, said = unread("-c", f"{MAIN}run_main({main})")
    assert status is None or found == status
    assert found != 0
    assert message in said if message else said == ""


def test_another_broken_pipe_is_an_error() -> None:
    command = "run_command(argparse.ArgumentParser('x'), argparse.Namespace(run=other_pipe))"
    for main in ("other_pipe", f"lambda: {command}"):
        done = subprocess.run(
            [sys.executable, "-c", f"{MAIN}run_main({main})"],
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        assert done.returncode == 1
        assert "[Errno 32] Broken pipe" in done.stderr


def test_other_statuses_are_those_of_main() -> None:
    for main, status in (("lambda: 0", 0), ("lambda: 2", 2), ("lambda: sys.exit(4)", 4)):
        done = subprocess.run([sys.executable, "-c", f"{MAIN}run_main({main})"], cwd=ROOT)
        assert done.returncode == status
