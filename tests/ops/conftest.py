"""Tests with the argument `backend` run on every backend (tests/support/backends.py).

`@pytest.mark.backends("cpu", "cuda")`, on a test or on one of its cases, names the only ones.
BERT_UNPAD_PTX_TESTS says how many run on `ptx`: `all`, `sample` (the default: one case of each
test) or `none`. Without a GPU one case of each test is skipped on `cuda`, the others are left out.
"""

from collections.abc import Iterator
from itertools import chain

import pytest
import torch

from bert_unpad.ops import matmul
from tests.support import (  # noqa: F401 (operators of `block` and `ptx`)
    model_attention,
    model_clip,
    model_embedding,
    model_fp8,
    model_gelu,
    model_linear,
    model_loss,
    model_norm,
    model_optim,
    model_rotary,
    model_signs,
)
from tests.support.attention_cases import Kernels
from tests.support.backends import BACKENDS, Backend
from tests.support.samples import leave_out, ptx_cases

NAMES = {backend.values[0] for backend in BACKENDS}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", BACKENDS, indirect=True)


def backend_of(item: pytest.Item) -> str | None:
    return item.callspec.params.get("backend") if hasattr(item, "callspec") else None


def has_backend(item: pytest.Item) -> bool:
    """Whether the marks of a test name its backend, where there are some."""
    names = [mark.args for mark in item.iter_markers("backends")]
    assert {*chain(*names)} <= NAMES, item.nodeid
    return all(backend_of(item) in only for only in names)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    of_backend = {"ptx": ptx_cases(), "cuda": "all" if torch.cuda.is_available() else "sample"}
    items[:] = filter(has_backend, items)
    leave_out(config, items, lambda item: of_backend.get(backend_of(item), "all"))


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with Backend(request.param).active() as active:
        yield active


@pytest.fixture
def kernels(
    request: pytest.FixtureRequest, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> Kernels:
    """Those of attention that the test names; see `kinds` of tests/support/attention_cases.py."""
    return Kernels(request.param, backend, monkeypatch)


def _takes_epilogues(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return x.dtype != torch.float32 and not any(size % 8 for size in weight.shape)


@pytest.fixture(params=[pytest.param(False, marks=pytest.mark.backends("cpu")), True])
def fused(
    request: pytest.FixtureRequest, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> bool:
    """Whether products are those of a GPU, with their epilogues."""
    if backend.name == "cpu":
        monkeypatch.setattr(matmul, "fused", lambda x, weight: request.param)
    elif backend.name != "cuda":
        monkeypatch.setattr(matmul, "fused", _takes_epilogues)
        monkeypatch.setattr(matmul, "product_dtype", lambda x: x.dtype)
    return request.param
