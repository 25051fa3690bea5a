"""Fixtures that several test files share."""

import pytest


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
