"""Tests with the argument `backend` run on every backend (tests/support/backends.py).

`@pytest.mark.backends("cpu", "cuda")`, on a test or on one of its cases, names the only ones.
BERT_UNPAD_PTX_TESTS says how many run on `ptx`: `all`, `sample` (the default: one case of each
test) or `none`. Without a GPU one case of each test is skipped on `cuda`, the others are left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain

import pytest
import torch

from tests.support import (  # noqa: F401 (operators of `block` and `ptx`)
    model_clip,
    model_embedding,
    model_gelu,
    model_loss,
    model_norm,
    model_optim,
    model_rotary,
    model_signs,
)
from tests.support.backends import BACKENDS, Backend

NAMES = {backend.values[0] for backend in BACKENDS}
PTX_TESTS = ("all", "sample", "none")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", BACKENDS, indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = os.environ.get("BERT_UNPAD_PTX_TESTS", "sample")
    if wanted not in PTX_TESTS:
        raise pytest.UsageError(
            f"BERT_UNPAD_PTX_TESTS: expected one of {PTX_TESTS}, got {wanted!r}"
        )
    gpu, kept, left_out, seen = torch.cuda.is_available(), [], [], set()
    for item in items:
        backend = item.callspec.params.get("backend") if hasattr(item, "callspec") else None
        names = [mark.args for mark in item.iter_markers("backends")]
        assert {*chain(*names)} <= NAMES, item.nodeid
        if any(backend not in only for only in names):
            continue
        if (backend == "ptx" and wanted != "all") or (backend == "cuda" and not gpu):
            function = (item.path, item.originalname, backend)
            if function in seen or (backend == "ptx" and wanted == "none"):
                left_out.append(item)
                continue
            seen.add(function)
        kept.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    items[:] = kept


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with Backend(request.param).active() as active:
        yield active
