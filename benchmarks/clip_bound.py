r"""Which `clip.max_norm` suits a configuration: norms of its gradients by bucket and rank.

    # as training is launched, with the same file
    torchrun --nproc-per-node 8 benchmarks/clip_bound.py --config my.yaml --updates 20 --share 0.5

Makes the first updates of the run with `clip.mode: bucket` and a bound that clips nothing, writes
the norm of each bucket on each rank to `norms.json` in the run's folder, and prints for `before`
and both policies of `bucket` the bound that clips --share of what they clip, and how much of a
rank's direction is then left. The first update does not count. The folder of the run must not have
a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from bert_unpad._files import replacing
from bert_unpad.distributed.bucket_clip import ClipReport
from bert_unpad.pretrain import main as train
from bert_unpad.pretrain.config import read_config
from bert_unpad.pretrain.gradients.clipping import GradientReport

NO_BOUND = 1e9  # larger than any norm
FILE = "norms.json"


class Enough(Exception):
    """Ends a run on all ranks, in the same update."""


@contextmanager
def recorded(run_dir: Path, updates: int, stops: bool = False) -> Iterator[None]:
    """Writes norms and bounds of the first updates to `run_dir`, [ranks, updates, 2, buckets].

    Args:
        run_dir: of the run; only rank 0 writes.
        updates: how many.
        stops: raise `Enough` after them.
    """
    made, lines = GradientReport.of, []

    def of(report: ClipReport, clips: bool = True) -> GradientReport:
        lines.append([report.norms.tolist(), report.bounds.tolist()])
        if len(lines) == updates:
            ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, lines)
            if dist.get_rank() == 0:
                run_dir.mkdir(parents=True, exist_ok=True)
                with replacing(run_dir / FILE) as temporary:
                    temporary.write_text(json.dumps(ranks))
            if stops:
                raise Enough
        return made(report, clips)

    GradientReport.of = of
    try:
        yield
    finally:
        GradientReport.of = made


def direction_kept(norms: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Cosine between a gradient and itself with clipped buckets, of norms [..., buckets]."""
    clipped = np.minimum(norms, bounds)
    lengths = np.linalg.norm(norms, axis=-1) * np.linalg.norm(clipped, axis=-1)
    return (norms * clipped).sum(-1) / lengths


def kept_in(run_dir: Path) -> float | None:
    """Mean of `direction_kept` over ranks and updates; None where a run clipped only averages."""
    path = run_dir / FILE
    if not path.exists():
        return None
    norms, bounds = np.moveaxis(np.array(json.loads(path.read_text())), 2, 0)
    return float(direction_kept(norms, bounds).mean())


def bounds_for(share: float, norms: np.ndarray, weights: np.ndarray) -> dict[str, list[float]]:
    """By mode and policy: the bound that clips a share, and the mean direction that it keeps.

    Args:
        share: of a rank's buckets (`before`: gradients) that are clipped.
        norms: of each bucket, [ranks, updates, buckets].
        weights: bounds of `adaptive` with a max_norm of 1, of the same shape.
    """
    equal = np.full_like(norms, norms.shape[-1] ** -0.5)
    found = {"before": [float(np.quantile(np.linalg.norm(norms, axis=-1), 1 - share)), 1.0]}
    for policy, parts in (("equal", equal), ("adaptive", weights)):
        bound = float(np.quantile(norms / parts, 1 - share))
        kept = direction_kept(norms, bound * parts).mean()
        found[f"bucket, {policy}"] = [bound, float(kept)]
    return found


def show(path: Path, share: float) -> None:
    # Without the first update, in which `adaptive` knows no norms yet.
    norms, weights = np.moveaxis(np.array(json.loads(path.read_text())), 2, 0)[:, :, 1:]
    for bucket, found in enumerate(np.moveaxis(norms, -1, 0)):
        low, middle, high = np.quantile(found, (0.1, 0.5, 0.9))
        print(f"bucket {bucket}: norm {middle:.3f}, 8 of 10 from {low:.3f} to {high:.3f}")
    for name, (bound, kept) in bounds_for(share, norms, weights / NO_BOUND).items():
        print(f"{name}: --clip.max_norm {bound:.3g} clips {share:.0%}, cosine {kept:.4f}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the measurement; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--share", type=float, default=0.5)
    options, rest = parser.parse_known_args(arguments)
    if options.updates < 2 or not 0 < options.share < 1:
        parser.error(
            "--updates and --share: expected at least 2 and a number between 0 and 1, got "
            f"{options.updates} and {options.share}"
        )
    rest += ["--clip.mode", "bucket", "--clip.policy", "adaptive", "--clip.max_norm", str(NO_BOUND)]
    config, _ = read_config(rest)
    run_dir = Path(config.run_dir)
    try:
        with recorded(run_dir, options.updates, stops=True):
            return train(rest) or 2  # the run was shorter
    except Enough:
        if os.environ.get("RANK", "0") == "0":
            show(run_dir / FILE, options.share)
        return 0


if __name__ == "__main__":
    sys.exit(main())
