"""Hooks around all GPU tests, those of tests/cuda and of tests/ops.

- On a GPU that multiplies no bf16, tests that need it are skipped.
- Tests that need much memory (`large`) are skipped where less is free.
- With BERT_UNPAD_TEST_EVERY=N every N-th test runs only, for tools that make them slow.
- After a kernel that fails nothing runs on the device any more in that process. So the process ends
  with the test that did it: pytest-xdist starts another worker for the rest.
"""

import os
from collections.abc import Generator

import pytest
import torch

REFUSED = "bfloat16 needs a GPU of compute capability 8.0"  # csrc/cuda/capability.h


@pytest.hookimpl(trylast=True)  # after -m has chosen
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = items[:: int(os.environ.get("BERT_UNPAD_TEST_EVERY", "1"))]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    mark = item.get_closest_marker("large")
    if mark is not None and torch.cuda.is_available():
        (gib,) = mark.args
        torch.cuda.empty_cache()
        if torch.cuda.mem_get_info()[0] < gib * 2**30:
            pytest.skip(f"needs {gib} GiB of GPU memory")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    try:
        return (yield)
    except RuntimeError as error:
        if REFUSED in str(error):
            pytest.skip(str(error))
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    result = yield
    if not torch.cuda.is_initialized():
        return result
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"\n{item.nodeid}: the device is lost: {error}", flush=True)
        if hasattr(item.config, "workerinput"):  # this process is a worker of pytest-xdist
            os._exit(1)  # before the test counts as done: it is reported as a crash of this worker
        item.session.shouldstop = f"{item.nodeid}: the device is lost"
    return result
