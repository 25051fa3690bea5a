"""Fixtures that several test files share."""

import os

import pytest

from tests.support.fresh_random import SEED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    """Says how to repeat the random choices of tests that have failed."""
    if exitstatus == pytest.ExitCode.TESTS_FAILED:
        terminalreporter.write_line(f"{SEED}={os.environ[SEED]} repeats what was random")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts files with slow tests first, so that no process is still busy when the others end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture
def packed_calls(monkeypatch) -> list[int]:
    """Grows by the number of keys of every attention that a Hugging Face model runs packed."""
    from bert_unpad.hf.packing import Packing

    calls: list[int] = []
    whole, last = Packing.attend, Packing.attend_last

    def attend(self, qkv, *args, **kwargs):
        calls.append(qkv.shape[0])
        return whole(self, qkv, *args, **kwargs)

    def attend_last(self, q, kv, *args, **kwargs):
        calls.append(kv.shape[0])
        return last(self, q, kv, *args, **kwargs)

    monkeypatch.setattr(Packing, "attend", attend)
    monkeypatch.setattr(Packing, "attend_last", attend_last)
    return calls
