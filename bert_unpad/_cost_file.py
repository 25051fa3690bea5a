"""The file of measured seconds by length: `simulate --fit` writes it, the trainer reads it too."""

import json
import os
from pathlib import Path

COST_FORMAT = "bert_unpad compute cost, version 1"


def read_cost(path: str | os.PathLike[str]) -> tuple[float, float, float]:
    """Seconds per token, per token squared and per step, as `simulate --fit` has written them.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no such file; the message names it.
    """
    try:
        stored = json.loads(Path(path).read_text("utf-8"))
        if stored["format"] != COST_FORMAT:
            raise ValueError(f"format {stored['format']!r}")
        return float(stored["linear"]), float(stored["quadratic"]), float(stored["fixed"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: expected a file of {COST_FORMAT!r} ({error})") from error
