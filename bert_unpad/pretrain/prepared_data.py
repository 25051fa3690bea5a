"""Opens the training data on all ranks."""

from bert_unpad.data import DamagedDataError, DataConfig, PreparedData, prepare
from bert_unpad.data.prepared import holds_examples
from bert_unpad.pretrain.config import ConfigError
from bert_unpad.pretrain.ranks import Ranks

_LITTLE = 0.25  # of the longest length
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


def short_examples(data: PreparedData) -> str | None:
    """A line for the log where examples fill little of the length, with what makes longer ones.

    Args:
        data: of the run.
    """
    config = data.config
    mean = data.statistics["train_tokens"] / data.statistics["train_examples"]
    if mean >= _LITTLE * config.max_seq_length:
        return None
    found = f"mean example {mean:.0f} of {config.max_seq_length} tokens (data.max_seq_length)"
    if config.mixture is not None or holds_examples(config.source):
        return found
    advice = "data.documents joined (with data.objective mlm or rtd) puts several into an example"
    if not config.source.startswith(("stdlib", "hf:", "stream:")):
        advice = (
            "in text files a blank line ends one, unless data.source is PATH?file_per_document="
            f"true; {advice}"
        )
    return f"{found}: most documents are short; {advice}"
