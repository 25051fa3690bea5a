"""Which updates of a run on simulated machines count."""

from argparse import Namespace
from pathlib import Path

from benchmarks import cluster


def test_the_last_update_that_counts_has_a_line(monkeypatch):
    def train(ranks, settings):
        end, every = settings["schedule.total_steps"], settings["logging.every"]
        logged = [step for step in range(1, end + 1) if step % every == 0 or step == end]
        lines = [{"kind": "train", "step": step, "seconds": 2.0 * step} for step in logged]
        return lines, [10 * step for step in range(end + 1)]

    monkeypatch.setattr(cluster, "train", train)
    monkeypatch.setattr(cluster, "settings_of", lambda name, folder, options, **more: more)
    options = Namespace(steps=13, settle=4, timed_start=0, folder=Path("nowhere"))
    for name in (cluster.ALONE, *cluster.CONTENDERS):
        assert cluster.timed(None, name, options) == {"step": 2.0, "bytes": 10.0}
