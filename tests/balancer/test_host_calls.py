"""Calls of the compiled library that knows no Python: what is checked, kept and freed."""

import copy
import gc
import pickle

import numpy as np
import pytest

from bert_unpad import _host_calls
from bert_unpad._balancer import EpochPlan, WorkModel, deal, pack
from bert_unpad._text import CharacterCounts, Masker, Splitter
from tests.support.epoch_plans import make_epoch_plan

KINDS = bytes([0, 0, 5, 5, 5, 7])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"seed": -1}, ValueError, "seed: expected an integer from 0 to 18446744073709551615"),
        ({"epoch": 2**64}, ValueError, "epoch: expected an integer from 0"),
        ({"batch_size": 2**63}, ValueError, "batch_size: expected an integer from -92"),
        ({"num_replicas": 2.0}, TypeError, "num_replicas: expected an integer, got 2.0"),
    ],
)
def test_numbers_that_would_be_cut(change, error, message) -> None:
    with pytest.raises(error, match=message):
        make_epoch_plan([5] * 10, **{"num_replicas": 2, "batch_size": 2} | change)


@pytest.mark.parametrize(
    "lengths",
    [[5, 6], np.array([5, 6], np.int64), np.zeros((2, 2), np.uint16), np.ones(8, np.uint16)[::2]],
)
def test_arrays_of_another_kind(lengths) -> None:
    with pytest.raises(TypeError, match=r"lengths: expected a contiguous .* array of uint16"):
        pack(lengths)
    with pytest.raises(TypeError, match=r"counts: expected a contiguous .* array of int64"):
        deal(
            np.ones(2, np.uint16),
            np.ones(2, np.int32),
            dealing="lpt",
            group_ranks=2,
            work=WorkModel(1, 0),
        )


def test_what_is_made_is_freed(monkeypatch) -> None:
    freed, free = [], _host_calls._library.bu_free
    monkeypatch.setattr(_host_calls._library, "bu_free", lambda p: (freed.append(p), free(p)))
    made = [
        make_epoch_plan([5] * 10, 2, 2),
        Masker(KINDS, unit="token", mask_id=1, max_predictions=None, always_mask=True, seed=0),
        Splitter(b""),
        CharacterCounts(),
    ]
    assert not freed
    count = len(made)
    del made
    gc.collect()
    assert len(freed) == count


def test_a_plan_keeps_its_lengths() -> None:
    lengths = np.arange(1, 1001, dtype=np.uint16)
    options = {"num_replicas": 2, "batch_size": 4, "seed": 1, "epoch": 0, "pool_steps": 8}
    plans = [
        EpochPlan(lengths.copy(), strategy="random", work=WorkModel(1, 0), **options)
        for _ in range(2)
    ]
    np.full(1000, 7, np.uint16)  # where freed lengths would have been
    gc.collect()
    first, second = (plan.work(0, plan.steps) for plan in plans)
    assert np.array_equal(first, second)
    assert first.sum() == lengths.sum()


def test_work_models_and_maskers_are_copied() -> None:
    work = WorkModel.for_hidden(256)
    assert pickle.loads(pickle.dumps(work)) == work == copy.deepcopy(work)
    options = {"unit": "word", "mask_id": 1, "max_predictions": 3, "always_mask": False, "seed": 9}
    masker = pickle.loads(pickle.dumps(Masker(KINDS, **options)))
    assert masker._make.keywords == options
    assert isinstance(copy.deepcopy(masker), Masker)
