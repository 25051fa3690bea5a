"""Parquet files with a column of lists of token ids, such as Hugging Face's data sets have.

Parquet has to decompress a group of rows to read one of them, so rows at random would take the time
of the whole file. Each file is converted once, to flat ids in the cache folder: 2 or 4 bytes an id.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bert_unpad.data.readers import Setting, find_files
from bert_unpad.data.readers.cached import cached_each, load_array, save_arrays
from bert_unpad.data.readers.tokens import TokenDataset, TokenFile
from bert_unpad.data.store.manifest import DamagedDataError

_ROWS = 4096  # decoded at a time
_IDS = "ids.bin"
_ARRAYS = ("begins", "lengths")


def open_split(path: Path, setting: Setting) -> TokenDataset:
    """See `bert_unpad.data.readers.open_split`; the option `column` names the column."""
    return TokenDataset(functools.partial(_open_files, path, setting), setting)


def _open_files(path: Path, setting: Setting) -> list[TokenFile]:
    files = find_files(path, "parquet", setting.without)
    column = setting.options.get("column", "input_ids")
    dtype = np.dtype("<u2" if setting.vocab_size <= 65_536 else "<u4")
    entries = [
        (
            *(setting.cache_dir, "parquet-1", [file], [column, setting.vocab_size]),
            functools.partial(_convert, file, column, dtype, setting.vocab_size),
            functools.partial(_load, file, dtype),
        )
        for file in files
    ]
    return cached_each(entries, "converting", setting.progress)


def _load(path: Path, dtype: np.dtype, folder: Path) -> TokenFile:
    begins, lengths = (load_array(folder, name, np.int64) for name in _ARRAYS)
    found = (folder / _IDS).stat().st_size
    if len(begins) != len(lengths) or found != lengths.sum() * dtype.itemsize:
        raise ValueError(f"{_IDS}: {found:,} bytes")
    return TokenFile(folder / _IDS, path, dtype, begins, lengths)


def _convert(path: Path, column: str, dtype: np.dtype, vocab_size: int, folder: Path) -> None:
    parts = [np.empty(0, np.int64)]
    try:
        with pq.ParquetFile(path) as file, (folder / _IDS).open("wb") as out:
            _check_column(path, file.schema_arrow, column)
            for batch in file.iter_batches(_ROWS, columns=[column]):
                rows = batch.column(0)
                ids = rows.flatten()
                if rows.null_count or ids.null_count:
                    raise DamagedDataError(f"{path}: {column}: expected ids, got null")
                values = ids.to_numpy()
                if len(values) and not 0 <= values.min() <= values.max() < vocab_size:
                    raise DamagedDataError(
                        f"{path}: {column}: expected ids of 0 to {vocab_size - 1} (the "
                        f"vocabulary), got {values.min()} to {values.max()}"
                    )
                values.astype(dtype).tofile(out)
                parts.append(pc.list_value_length(rows).to_numpy().astype(np.int64))
    except (pa.ArrowException, OSError) as error:
        if getattr(error, "errno", None) is not None:  # of the disk
            raise
        raise DamagedDataError(f"{path}: expected a complete Parquet file ({error})") from error
    lengths = np.concatenate(parts)
    ends = np.cumsum(lengths) * dtype.itemsize
    save_arrays(folder, begins=ends - lengths * dtype.itemsize, lengths=lengths)


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
