"""On a GPU that multiplies no bf16, tests that need it are skipped."""

from __future__ import annotations

from collections.abc import Generator

import pytest

REFUSED = "bfloat16 needs a GPU of compute capability 8.0"  # csrc/cuda/capability.h


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    try:
        return (yield)
    except RuntimeError as error:
        if REFUSED in str(error):
            pytest.skip(str(error))
        raise
