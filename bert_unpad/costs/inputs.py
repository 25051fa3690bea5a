"""Models and lengths by the names that commands take."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bert_unpad.data.sampling.histogram import measure_histogram, read_histogram, wikipedia_lengths
from bert_unpad.nn.config import PRESETS, BertConfig


def model_config(name: str) -> BertConfig:
    """The model that `--model` names.

    Raises:
        ValueError: no preset and no configuration that this package can compute.
        OSError: the file cannot be read.
    """
    if name in PRESETS:
        return BertConfig(**PRESETS[name])
    if not Path(name).is_file():
        raise ValueError(
            f"argument --model: expected one of {', '.join(PRESETS)}, or a config.json, "
            f"got {name!r}"
        )
    return BertConfig.from_json(Path(name))


def read_counts(name: str, option: str) -> NDArray[np.int64]:
    """The histogram of lengths that an option names.

    Args:
        name: `wikipedia`, a text file of counts, or a folder of prepared data.
        option: whose value that is, for messages.

    Raises:
        ValueError: it is none of these; the message names the option.
    """
    if name == "wikipedia":
        return wikipedia_lengths()
    try:
        if Path(name).is_dir():
            return measure_histogram(name)
        return read_histogram(name)
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"argument {option}: {error}") from error
