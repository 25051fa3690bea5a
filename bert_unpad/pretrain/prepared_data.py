"""Opens the training data on all ranks."""

from __future__ import annotations

from bert_unpad.data import DamagedDataError, DataConfig, PreparedData, prepare
from bert_unpad.pretrain.config import ConfigError
from bert_unpad.pretrain.ranks import Ranks

__all__ = ["DATA_ERRORS", "open_data"]

DATA_ERRORS = (DamagedDataError, ImportError, OSError, ValueError)
"""What `prepare` raises where settings or files are wrong."""


def open_data(config: DataConfig, ranks: Ranks, key: str = "data") -> PreparedData:
    """Opens, and where needed prepares, the data of a run.

    The first rank of each machine prepares and checks; the others open what it has checked.

    Args:
        config: the data.
        ranks: this process among all of the run; each of them has to call this.
        key: the option that an error names.

    Raises:
        ConfigError: the data cannot be prepared or opened; on all ranks if a first one cannot.
    """
    data, failure = None, None
    if ranks.is_first_of_node:
        try:
            data = prepare(config, progress=None if ranks.is_first else False)
        except DATA_ERRORS as error:
            failure = error
    ranks.meet()  # preparing may take hours, and one machine may have to where another had not
    failed = ranks.gather(failure is not None)
    if failure is not None:
        raise ConfigError(key, str(failure)) from failure
    if any(failed):  # the others would prepare what has failed already
        culprit = failed.index(1)
        raise ConfigError(
            key,
            f"expected data that all ranks can open, got an error on rank {culprit}, whose message "
            "says why",
        )
    if data is None:
        try:
            data = prepare(config, progress=False, check=False)
        except DATA_ERRORS as error:
            raise ConfigError(key, str(error)) from error
    return data
