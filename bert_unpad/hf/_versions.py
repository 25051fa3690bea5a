"""The supported versions of transformers, and the errors for older ones."""

from __future__ import annotations

import re

ATTENTION_SINCE = (4, 57)
UNPAD_SINCE = (5, 0)


def transformers_version() -> tuple[int, int]:
    """Returns (major, minor) of the installed transformers.

    Raises:
        ImportError: transformers is not installed.
    """
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ImportError(
            "bert_unpad.hf needs transformers: pip install 'transformers>=5.0'"
        ) from error
    major, minor = re.findall(r"\d+", transformers.__version__)[:2]
    return int(major), int(minor)


def require_transformers(
    since: tuple[int, int] = ATTENTION_SINCE, what: str = "bert_unpad.hf"
) -> None:
    """Raises an ImportError that names `what` if transformers is older than `since`."""
    version = transformers_version()
    if version < since:
        raise ImportError(
            f"{what} needs transformers >= {since[0]}.{since[1]}, "
            f"but {version[0]}.{version[1]} is installed"
        )


def has_attention_tables() -> bool:
    """Whether BERT finds its attention in a table of classes instead of the attention interface.

    The version number does not tell: 4.57.6 has the interface, but only other models use it.
    """
    from transformers.models.bert import modeling_bert

    return not hasattr(modeling_bert, "ALL_ATTENTION_FUNCTIONS")
