"""The supported versions of transformers, and the errors for older ones."""

from __future__ import annotations

import re

SINCE = (5, 0)


def require_transformers() -> None:
    """Checks the installed transformers.

    Raises:
        ImportError: it is too old, or there is none.
    """
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ImportError(
            "bert_unpad.hf needs transformers: pip install 'transformers>=5.0'"
        ) from error
    major, minor = map(int, re.findall(r"\d+", transformers.__version__)[:2])
    if (major, minor) < SINCE:
        raise ImportError(
            f"bert_unpad.hf needs transformers >= {SINCE[0]}.{SINCE[1]}, "
            f"but {major}.{minor} is installed"
        )
