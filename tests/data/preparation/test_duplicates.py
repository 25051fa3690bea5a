"""Duplicates found by ranges of digests, against a set of all digests."""

import numpy as np
import pytest

from bert_unpad.data.preparation.duplicates import count_duplicates, distinct, find_duplicates
from bert_unpad.data.preparation.spool import SpooledBlock
from tests.support.seeds import derived

FIRST = np.array([0, 1, 2**62, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1], np.uint64)


class Digests:
    """Cleaned documents with given digests and no text."""

    text = b""

    def __init__(self, digests):
        self._digests = digests
        self.ends = self.sentences = np.zeros(len(digests), np.int64)

    def digests(self):
        return self._digests


@pytest.mark.parametrize("ranges", [1, 2, 3, 10])
def test_the_first_of_equal_documents_stays(tmp_path, monkeypatch, ranges):
    rng = np.random.default_rng(derived(0))
    sizes = [0, 40, 1, 90, 0, 7]
    blocks = [np.stack([rng.choice(FIRST, n), rng.integers(0, 9, n, np.uint64)], 1) for n in sizes]
    (tmp_path / "found").mkdir()
    for number, digests in enumerate(blocks):
        SpooledBlock(tmp_path, number).write([Digests(digests[:3]), Digests(digests[3:])])
    read, digests_of = [], SpooledBlock.digests

    def counted(block, lowest, highest):
        read.append(digests_of(block, lowest, highest))
        assert all(lowest <= first < highest for first in read[-1][0].tolist())
        return read[-1].copy()

    monkeypatch.setattr(SpooledBlock, "digests", counted)
    for number in range(ranges):
        find_duplicates(tmp_path, tmp_path / "found", len(blocks), number, ranges)
    assert sum(part.shape[1] for part in read) == sum(sizes)  # each once

    seen: set[tuple[int, int]] = set()
    for number, digests in enumerate(blocks):
        expected = []
        for digest in map(tuple, digests.tolist()):
            expected.append(digest not in seen)
            seen.add(digest)
        found = distinct(tmp_path / "found", ranges, number, len(digests))
        assert found.tolist() == expected
    assert count_duplicates(tmp_path / "found", ranges) == sum(sizes) - len(seen)
