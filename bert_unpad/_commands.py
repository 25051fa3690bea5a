"""How commands end: with an exit status, and one line about what went wrong."""

import argparse
import sys

from bert_unpad._closed_pipe import nobody_reads
from bert_unpad._full_disk import FullDiskError


def run_command(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    failures: tuple[type[Exception], ...] = (),
) -> int:
    """Calls `options.run(options)`; returns the exit status of the process.

    Args:
        parser: the command's, whose usage goes with an error of the arguments.
        options: what it has parsed, with the function to call as `run`.
        failures: errors that say what is wrong with data or processes; others have a traceback.

    Returns:
        0 if all went well, 1 for failures and for a disk that is full or fails, 130 after an
        interruption.

    Raises:
        SystemExit: with 2, for bad arguments, missing files and missing packages.
        BrokenPipeError: nobody reads the output any more.
    """
    try:
        options.run(options)
    except failures as error:
        return _fail(parser, str(error), 1)
    except (ImportError, FileExistsError, FileNotFoundError, ValueError) as error:
        parser.error(str(error))
    except FullDiskError as error:
        return _fail(parser, f"{error}; make room, and the same command continues", 1)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and nobody_reads():
            raise  # run_main ends the process
        if error.errno is None:  # not of the system
            parser.error(str(error))
        return _fail(parser, str(error), 1)
    except KeyboardInterrupt:
        return _fail(parser, "stopped; the same command continues", 130)
    return 0


def _fail(parser: argparse.ArgumentParser, message: str, status: int) -> int:
    print(f"{parser.prog}: {message}", file=sys.stderr)
    return status
