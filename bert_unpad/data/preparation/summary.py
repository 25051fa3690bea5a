"""What a preparation reports at its end."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bert_unpad.data.preparation.pipeline import Report
from bert_unpad.data.prepared import SPLITS
from bert_unpad.data.store.shards import AT_ONCE, MAX_LENGTH, ShardDataset

_QUANTILES = (0.25, 0.5, 0.75, 0.95)


def summary(folder: Path, statistics: dict[str, int], report: Report | None = None) -> str:
    """Describes finished data, and the time that each stage took."""
    lines = [
        f"{folder}: {statistics['documents']:,} documents, "
        f"{statistics['duplicates']:,} duplicates left out"
    ]
    for split in SPLITS:
        counts = (
            f"{statistics[f'{split}_{what}']:,} {what}"
            for what in ("documents", "examples", "tokens")
        )
        lines.append(f"{split}: {', '.join(counts)}{_lengths(folder / split)}")
    for name, stage in (report.stages if report else {}).items():
        rate = f"{stage.bytes / 1e6 / stage.worker_seconds:.1f} MB/s a worker"
        text = f", {stage.bytes / 1e6:,.1f} MB of text, {rate}" if stage.bytes else ""
        lines.append(f"{name}: {stage.worker_seconds:,.1f} s of one worker{text}")
    return "\n".join(lines)


def _lengths(path: Path) -> str:
    lengths = ShardDataset(path, verify=False).lengths
    if not len(lengths):
        return ""
    counts = np.zeros(MAX_LENGTH + 1, np.int64)
    for begin in range(0, len(lengths), AT_ONCE):  # of all at once, a large corpus has billions
        counts += np.bincount(lengths[begin : begin + AT_ONCE], minlength=len(counts))
    up_to = np.cumsum(counts)
    places = np.multiply(_QUANTILES, len(lengths))
    quarter, middle, three_quarters, most = np.searchsorted(up_to, places)
    return (
        f"; lengths: mean {lengths.mean():.1f}, quartiles {quarter}, {middle}, {three_quarters}, "
        f"95 % up to {most}, longest {lengths.max()}"
    )
