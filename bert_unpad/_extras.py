"""The error of a command that needs packages of an optional extra."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def packages_of(extra: str) -> Iterator[None]:
    """Context for imports of packages that `bert_unpad[extra]` installs; for commands only.

    Raises:
        SystemExit: a package is not installed. The exit code is 2, and a line says what to do.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "bert_unpad"):  # an error of ours
            raise
        print(f"this needs {package}: pip install 'bert_unpad[{extra}]'", file=sys.stderr)
        raise SystemExit(2) from None
