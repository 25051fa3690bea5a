"""Parquet files with a column of lists of token ids, such as Hugging Face's data sets have."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bert_unpad.data.formats import Setting
from bert_unpad.data.formats.tokens import Sequences, cut_sequences
from bert_unpad.data.store.example_batch import ExampleBatch
from bert_unpad.data.store.manifest import DamagedDataError

_ROWS = 4096  # decoded at a time


def examples(path: Path, setting: Setting) -> Iterator[ExampleBatch]:
    """Reads the examples of a file; the option `column` names the column."""
    column = setting.options.get("column", "input_ids")
    return cut_sequences(path, _sequences(path, column), setting)


def _sequences(path: Path, column: str) -> Iterator[Sequences]:
    try:
        with pq.ParquetFile(path) as file:
            _check_column(path, file.schema_arrow, column)
            for batch in file.iter_batches(_ROWS, columns=[column], use_threads=False):
                rows = batch.column(0)
                ids = rows.flatten()
                if rows.null_count or ids.null_count:
                    raise DamagedDataError(f"{path}: {column}: expected ids, got null")
                yield ids.to_numpy(), pc.list_value_length(rows).to_numpy().astype(np.int64)
    except (pa.ArrowException, OSError) as error:
        if getattr(error, "errno", None) is not None:  # of the disk
            raise
        raise DamagedDataError(f"{path}: expected a complete Parquet file ({error})") from error


def _check_column(path: Path, schema: pa.Schema, column: str) -> None:
    def is_ids(kind: pa.DataType) -> bool:
        lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
        return any(is_list(kind) for is_list in lists) and pa.types.is_integer(kind.value_type)

    names = [field.name for field in schema if is_ids(field.type)]
    if column not in names:
        kind = schema.field(column).type if column in schema.names else "no such column"
        raise DamagedDataError(
            f"{path}: {column}: expected a column of lists of integers (the option column of the "
            f"source names it; there are {', '.join(names) or 'none'}), got {kind}"
        )
