"""What benchmarks.clip_bound measures, and what it makes of the norms."""

import json

import numpy as np
import pytest
import torch

from benchmarks import clip_bound
from bert_unpad.distributed.bucket_shares import BucketShares
from tests.support.pretrain_runs import finish, make_folder
from tests.support.processes import start_ranks
from tests.support.seeds import derived


def _norms(updates: int = 400) -> np.ndarray:
    """Norms [2, updates, 5] of buckets as unequal as those of a model, which change slowly."""
    draw = np.random.default_rng(derived(0))
    typical = np.array([[3.0, 1.0, 0.5, 0.2, 0.05], [1.5, 2.0, 0.4, 0.3, 0.02]])
    return typical[:, None] * np.exp(0.1 * draw.normal(size=(2, updates, 5)))


def _weights(norms: np.ndarray) -> np.ndarray:
    """What the policy `adaptive` gives, in bounds of 1."""
    device, found = torch.device("cpu"), np.empty_like(norms)
    for rank, updates in enumerate(norms):
        shares = BucketShares("adaptive", 5)
        for number, buckets in enumerate(updates):
            found[rank, number] = [float(shares.next(1, device)) ** 0.5 for _ in buckets]
            shares.end(torch.from_numpy(buckets))
    return found


def test_adaptive_keeps_the_direction_that_equal_loses():
    norms = _norms()
    weights = _weights(norms)[:, 1:]  # after the first update, which has no norms before it
    found = clip_bound.bounds_for(0.5, norms[:, 1:], weights)
    (before, _), (_, equal), (adaptive, kept) = found.values()
    assert kept > 0.99
    assert equal < 0.95
    # A bound for the whole gradient nearly serves `adaptive` too.
    assert adaptive == pytest.approx(before, rel=0.15)
    # With the same bound as well, and where it clips nothing `adaptive` does almost nothing.
    for bound in (0.5 * before, before):
        parts = np.full(5, bound * 5**-0.5)
        assert clip_bound.direction_kept(norms, parts).mean() < 0.97
        assert clip_bound.direction_kept(norms[:, 1:], bound * weights).mean() > 0.99


def test_the_bound_clips_the_share_asked_for():
    norms = _norms()
    weights = _weights(norms)
    for share in (0.1, 0.5):
        found = clip_bound.bounds_for(share, norms, weights)
        bounds = {name: bound for name, (bound, _) in found.items()}
        whole = np.linalg.norm(norms, axis=-1)
        assert (whole > bounds["before"]).mean() == pytest.approx(share, abs=0.01)
        equal = bounds["bucket, equal"] / 5**0.5
        assert (norms > equal).mean() == pytest.approx(share, abs=0.01)
        adaptive = bounds["bucket, adaptive"] * weights
        assert (norms > adaptive).mean() == pytest.approx(share, abs=0.01)


@pytest.mark.slow
def test_norms_are_of_every_bucket_on_every_rank(tmp_path):
    make_folder(tmp_path)
    run_dir = tmp_path / "measured"
    arguments = ["--updates", "3", "--config", str(tmp_path / "run.yaml")]
    arguments += ["--run_dir", str(run_dir), "--comm.bucket_mb", "0.01"]
    log = tmp_path / "measured.log"
    codes, output = finish(
        tmp_path, "measured", start_ranks(clip_bound.main, 2, arguments, log=log)
    )
    assert codes == [0, 0], output
    found = np.array(json.loads((run_dir / clip_bound.FILE).read_text()))
    ranks, updates, _, buckets = found.shape
    assert (ranks, updates) == (2, 3)
    assert buckets > 2
    norms, bounds = np.moveaxis(found, 2, 0)
    assert (norms < bounds).all()
    assert np.linalg.norm(bounds, axis=-1) == pytest.approx(clip_bound.NO_BOUND, rel=1e-5)
    assert not np.allclose(norms[0], norms[1])
    lines = output.splitlines()
    assert sum(line.startswith("bucket 0: norm ") for line in lines) == 1
    assert any(line.startswith("bucket, adaptive: --clip.max_norm ") for line in lines)
