"""How commands end."""

import argparse
import errno

import pytest

from bert_unpad._commands import run_command


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (None, 0, ""),
        (RuntimeError("a worker was killed"), 1, "command: a worker was killed\n"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "command: [Errno 28] No space left"),
        (PermissionError(errno.EACCES, "Permission denied", "x"), 1, "command: [Errno 13] Perm"),
        (KeyboardInterrupt(), 130, "command: stopped; the same command continues\n"),
        (ValueError("lr: expected a number"), 2, "command: error: lr: expected a number\n"),
        (ImportError("needs the package x"), 2, "command: error: needs the package x\n"),
        (OSError("cache_dir: expected a folder"), 2, "command: error: cache_dir: expected a "),
        (FileNotFoundError(errno.ENOENT, "No such file", "x"), 2, "error: [Errno 2] No such file"),
        (FileExistsError("out exists"), 2, "command: error: out exists\n"),
    ],
)
def test_an_error_is_one_line_and_a_status(error, status, message, capsys):
    def run(options):
        if error is not None:
            raise error

    parser = argparse.ArgumentParser("command")
    try:
        found = run_command(parser, argparse.Namespace(run=run), (RuntimeError,))
    except SystemExit as ended:
        found = ended.code
    assert found == status
    assert message in capsys.readouterr().err


def test_other_errors_have_a_traceback():
    def run(options):
        raise RuntimeError("of a library")

    with pytest.raises(RuntimeError, match="of a library"):
        run_command(argparse.ArgumentParser(), argparse.Namespace(run=run))
