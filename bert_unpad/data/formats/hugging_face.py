"""Data sets of the Hugging Face `datasets` library: each row is one document."""

import hashlib
import importlib
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl

_OPTIONS = ("config", "split", "column", "revision", "data_files", "streaming", "limit")


class HuggingFaceSource:
    """A data set of the Hugging Face `datasets` library; each row is one document.

    Args:
        specification: `NAME` or `NAME?option=value&...` with the options `config`, `split`
            (default train), `column` (default text), `revision`, `data_files`, `streaming`
            (true or false, default false) and `limit` (number of rows).

    A streamed data set has no content digest. Its name, options and version identify it, so set
    `revision` if it may change. Reading can be interrupted and resumed (`position`) with versions
    of `datasets` whose streams have a state.

    Raises:
        ImportError: `datasets` is not installed.
        ValueError: an option or the column is unknown.
    """

    def __init__(self, specification: str) -> None:
        self.name = f"hf:{specification}"
        self.path, _, query = specification.partition("?")
        options = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
        unknown = sorted(set(options) - set(_OPTIONS))
        if unknown or not self.path:
            raise ValueError(
                f"source={self.name!r}: expected hf:NAME?option=value&... with options among "
                f"{', '.join(_OPTIONS)}" + (f"; got {', '.join(unknown)}" if unknown else "")
            )
        streaming = options.get("streaming", "false").lower()
        if streaming not in ("true", "false"):
            raise ValueError(f"source={self.name!r}: streaming must be true or false")
        limit = options.get("limit")
        if limit is not None and (not limit.isdecimal() or int(limit) < 1):
            raise ValueError(f"source={self.name!r}: limit must be a positive number of rows")
        self.options = options
        self.streaming = streaming == "true"
        self.column = options.get("column", "text")
        self.limit = int(limit) if limit else None
        self._dataset: Any = None
        self.position: dict[str, Any] | None = None
        """The position of `documents`, as JSON values, before the last block of 1,000 rows it read.

        None within the first block, or if the stream cannot resume.
        """

    def load(self) -> Any:
        """Opens the data set with `datasets`."""
        if self._dataset is None:
            try:
                datasets = importlib.import_module("datasets")
            except ImportError as error:
                raise ImportError(
                    f"source={self.name!r} needs the package `datasets`: "
                    "pip install 'bert_unpad[datasets]'"
                ) from error
            dataset = datasets.load_dataset(
                self.path,
                self.options.get("config"),
                split=self.options.get("split", "train"),
                revision=self.options.get("revision"),
                data_files=self.options.get("data_files"),
                streaming=self.streaming,
            )
            columns = dataset.column_names  # None while a stream has not been looked into
            if columns is not None and self.column not in columns:
                raise ValueError(
                    f"source={self.name!r}: no column {self.column!r}; expected one of "
                    f"{', '.join(columns)} (option column=...)"
                )
            self._dataset = dataset
        return self._dataset

    def fingerprint(self) -> str:
        dataset = self.load()
        content = None if self.streaming else dataset._fingerprint
        version = str(getattr(dataset.info, "version", None))
        return hashlib.sha256(
            json.dumps(["hf, version 1", self.name, version, content]).encode()
        ).hexdigest()

    def documents(self, position: dict[str, Any] | None = None) -> Iterator[str]:
        """See `Source`."""
        dataset, left = self.load(), self.limit
        if position is not None:
            dataset.load_state_dict(position["stream"])
            left = position["left"]
        resumable = self.streaming and hasattr(dataset, "state_dict")
        for batch in dataset.iter(batch_size=1000):
            if self.column not in batch:
                raise ValueError(
                    f"source={self.name!r}: no column {self.column!r}; expected one of "
                    f"{', '.join(batch)} (option column=...)"
                )
            texts = batch[self.column] if left is None else batch[self.column][:left]
            yield from (text for text in texts if text)
            if left is not None:
                left -= len(texts)
                if not left:
                    return
            if resumable:  # reached when the consumer has taken the last text of the batch
                self.position = {"stream": dataset.state_dict(), "left": left}
