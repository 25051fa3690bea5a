"""Which ranks prepare and check the data, and which open what was checked."""

from types import SimpleNamespace

import pytest

from bert_unpad.data import DataConfig
from bert_unpad.pretrain import prepared_data
from bert_unpad.pretrain.config import ConfigError
from bert_unpad.pretrain.prepared_data import open_data
from bert_unpad.pretrain.ranks import Ranks


@pytest.fixture
def calls(monkeypatch):
    found = []

    def prepare(config, progress=None, check=True):
        found.append(check)
        if config.seed == 9:
            raise ValueError("source: expected another one")
        return "data"

    monkeypatch.setattr(prepared_data, "prepare", prepare)
    return found


def rank_of(calls, rank, node_size):
    watch = SimpleNamespace(meet=lambda: calls.append("meet"))
    place = rank % node_size
    return RankAlone(rank, 8, None, None, node_size, watch=watch, local_rank=place)


class RankAlone(Ranks):
    """A rank whose others succeed."""

    def gather(self, value):
        return [value if rank == self.rank else 0.0 for rank in range(self.world_size)]


@pytest.mark.parametrize(
    ("rank", "node_size", "expected"),
    [
        (0, 4, [True, "meet"]),
        (3, 4, ["meet", False]),
        (4, 4, [True, "meet"]),
        (5, 1, [True, "meet"]),
    ],
)
def test_one_rank_of_a_machine_checks(calls, rank, node_size, expected):
    assert open_data(DataConfig(), rank_of(calls, rank, node_size)) == "data"
    assert calls == expected


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_name_the_option(calls, rank):
    with pytest.raises(ConfigError, match=r"^growth\.lengths: source: expected another one"):
        open_data(DataConfig(seed=9), rank_of(calls, rank, 2), "growth.lengths")
    assert "meet" in calls


def test_other_ranks_do_not_prepare_what_has_failed(calls, monkeypatch):
    monkeypatch.setattr(RankAlone, "gather", lambda *_: [0.0] * 4 + [1.0] + [0.0] * 3)
    for rank in (0, 1, 5):
        message = r"^data: expected data that all ranks can open, got an error on rank 4, whose"
        with pytest.raises(ConfigError, match=message):
            open_data(DataConfig(), rank_of(calls, rank, 4))
    assert calls == [True, "meet", "meet", "meet"]


def test_a_full_disk_is_named(calls, monkeypatch):
    def prepare(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prepared_data, "prepare", prepare)
    with pytest.raises(ConfigError, match="No space left on device"):
        open_data(DataConfig(), rank_of(calls, 0, 4))
