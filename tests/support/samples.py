"""How many cases of a test run where one of them says nearly what all say."""

import os
from collections.abc import Callable
from typing import Literal

import pytest

Cases = Literal["all", "sample", "none"]
CASES: tuple[Cases, ...] = ("all", "sample", "none")
"""All, one of each test, or none."""


def ptx_cases() -> Cases:
    """How many run on compiled kernels, as BERT_UNPAD_PTX_TESTS says."""
    given = os.environ.get("BERT_UNPAD_PTX_TESTS", "sample")
    for known in CASES:
        if given == known:
            return known
    raise pytest.UsageError(f"BERT_UNPAD_PTX_TESTS: expected one of {CASES}, got {given!r}")


def leave_out(
    config: pytest.Config, items: list[pytest.Item], cases: Callable[[pytest.Item], Cases]
) -> None:
    """Deselects items in place; `cases` says how many of an item's test and backend run."""
    kept, left_out, seen = [], [], set()
    for item in items:
        wanted = cases(item)
        if wanted != "all":
            backend = item.callspec.params.get("backend")
            test = (item.path, item.originalname, backend)
            if wanted == "none" or test in seen:
                left_out.append(item)
                continue
            seen.add(test)
        kept.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept
