"""Fixtures that several test files share."""

import os
import random
import zlib

import numpy as np
import pytest
import torch

from tests.support import gpu_hooks
from tests.support.seeds import SEED, derived


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed", type=int, help="the seed of all random choices (default: another one in each run)"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(gpu_hooks)
    seed = config.getoption("--seed")
    if seed is not None:
        if not 0 <= seed < 2**32:
            raise pytest.UsageError(f"--seed: expected 0 to {2**32 - 1}, got {seed}")
        os.environ[SEED] = str(seed)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"--seed {os.environ[SEED]} repeats the random choices")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that sets no seed of its own draws the same alone, in another order or process."""
    seed = derived(zlib.crc32(item.nodeid.encode()))
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts files with slow tests first, so that no process is still busy when the others end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture
def packed_calls(monkeypatch) -> list[int]:
    """Grows by the number of keys of every attention that a Hugging Face model runs packed."""
    from bert_unpad.hf import inference
    from bert_unpad.hf.packing import Packing

    calls: list[int] = []
    whole, last, layers = Packing.attend, Packing.attend_last, inference.encoder_layers

    def attend(self, qkv, *args, **kwargs):
        calls.append(qkv.shape[0])
        return whole(self, qkv, *args, **kwargs)

    def attend_last(self, q, kv, *args, **kwargs):
        calls.append(kv.shape[0])
        return last(self, q, kv, *args, **kwargs)

    def encoder_layers(x, cu_seqlens, longest, parameters, shapes, **more):
        calls.extend([x.shape[0]] * len(shapes))
        return layers(x, cu_seqlens, longest, parameters, shapes, **more)

    monkeypatch.setattr(inference, "encoder_layers", encoder_layers)
    monkeypatch.setattr(Packing, "attend", attend)
    monkeypatch.setattr(Packing, "attend_last", attend_last)
    return calls
