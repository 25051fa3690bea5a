"""MDS: shards of mosaicml-streaming and of an independent writer, damaged and hostile ones."""

import bz2
import gzip
import json
import struct

import numpy as np
import pytest

from bert_unpad.data import DamagedDataError
from bert_unpad.data.formats import mds
from tests.support.masked_examples import CLS, SEP
from tests.support.mds_files import compress, write_mds
from tests.support.token_files import random_sequences, read_sequences

SEQUENCES = [*random_sequences(48), [CLS, *[7] * 400, SEP]]
LONG = 402


def samples(kind="int32"):
    return [
        {"input_ids": np.array(ids, kind), "id": f"doc {i}", "score": i, "zzz": b"x" * (i % 3)}
        for i, ids in enumerate(SEQUENCES)
    ]


OTHERS = {"id": "str", "score": "int", "zzz": "bytes"}


def open_all(folder, **options):
    return read_sequences(folder, "mds", LONG, **options)


@pytest.mark.parametrize("kind", ["", ":uint16", ":int32", ":int64"])
def test_arrays_of_every_length(tmp_path, kind):
    folder = write_mds(tmp_path / "data", {"input_ids": f"ndarray{kind}", **OTHERS}, samples())
    assert open_all(folder) == SEQUENCES


def test_arrays_of_one_length(tmp_path):
    rows = [[CLS, *range(10, 14), SEP], [CLS, *range(20, 24), SEP]]
    values = [{"input_ids": np.array(row)} for row in rows]
    folder = write_mds(tmp_path / "data", {"input_ids": "ndarray:uint16:6"}, values)
    assert open_all(folder) == rows


def test_bytes_with_a_type(tmp_path):
    values = [{"tokens": np.array(ids, "<i8").tobytes()} for ids in SEQUENCES]
    folder = write_mds(tmp_path / "data", {"tokens": "bytes"}, values)
    assert open_all(folder, column="tokens", dtype="int64") == SEQUENCES
    with pytest.raises(DamagedDataError, match=r"expected the option dtype of the source, because"):
        open_all(folder, column="tokens")


def test_folders_below_a_folder_are_read_in_order(tmp_path):
    columns = {"input_ids": "ndarray:uint16"}
    for name, some in (("b", slice(20, None)), ("a", slice(20))):
        write_mds(tmp_path / "data" / name, columns, samples()[some], each=7)
    assert open_all(tmp_path / "data") == SEQUENCES


@pytest.mark.parametrize(("ending", "pack"), [("gz", gzip.compress), ("bz2", bz2.compress)])
def test_compressed_shards(tmp_path, ending, pack):
    folder = write_mds(tmp_path / "data", {"input_ids": "ndarray", **OTHERS}, samples())
    compress(folder, ending, pack)
    assert open_all(folder) == SEQUENCES


def test_damaged_compressed_shards_are_named(tmp_path):
    folder = write_mds(tmp_path / "data", {"input_ids": "ndarray"}, samples())
    compress(folder, "gz", lambda data: gzip.compress(data)[:-9])
    with pytest.raises(DamagedDataError, match=r"\d\.mds\.gz: expected a complete \.gz file"):
        open_all(folder)
    for path in folder.glob("*.gz"):
        path.write_bytes(gzip.compress(bytes(10**6)))  # more than the index says
    with pytest.raises(DamagedDataError, match=r"\d\.mds\.gz: expected [\d,]+ bytes, as index"):
        open_all(folder)
    folder = write_mds(tmp_path / "other", {"input_ids": "ndarray"}, samples(), each=99)
    compress(folder, "br", lambda data: data)
    with pytest.raises(DamagedDataError, match=r"expected a shard \*\.mds, perhaps compressed"):
        open_all(folder)


def change_index(folder, change):
    path = folder / "index.json"
    index = json.loads(path.read_text())
    change(index["shards"][0])
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda shard: shard["raw_data"].update(basename="../x.mds"), "basename: the name of a"),
        (lambda shard: shard["raw_data"].update(basename="/etc/passwd"), "basename: the name of a"),
        (lambda shard: shard["raw_data"].update(basename=5), "basename: the name of a"),
        (lambda shard: shard["raw_data"].update(bytes=-1), "bytes: 0 to 4,294,967,296, got -1"),
        (lambda shard: shard.update(samples=2**40), "samples: 0 to"),
        (lambda shard: shard.update(format="json"), "format mds, version 2; got 'json'"),
        (
            lambda shard: shard.pop("column_names"),
            "expected an index of MDS shards: 'column_names'",
        ),
        (lambda shard: shard["column_sizes"].append(4), "a name, an encoding and a size for each"),
        (lambda shard: shard["column_sizes"].__setitem__(0, -4), "size: 0 to"),
        (lambda shard: shard["column_names"].__setitem__(0, ["x"]), "expected an index of MDS"),
    ],
)
def test_damaged_indexes_are_named(tmp_path, change, message):
    folder = write_mds(tmp_path / "data", {"input_ids": "ndarray", **OTHERS}, samples())
    change_index(folder, change)
    with pytest.raises(DamagedDataError, match=rf"index\.json: .*{message}"):
        open_all(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1}', '{"version": 2, "shards": 3}'])
def test_what_is_no_index_is_named(tmp_path, text):
    folder = write_mds(tmp_path / "data", {"input_ids": "ndarray"}, samples())
    (folder / "index.json").write_text(text)
    with pytest.raises(DamagedDataError, match=r"index\.json: expected"):
        open_all(folder)


def patch(at, value, kind="<I"):
    def changed(data):
        place = at(data) if callable(at) else at
        size = struct.calcsize(kind)
        return data[:place] + struct.pack(kind, value) + data[place + size :]

    return changed


def sample(number, offset=0):
    """Where a sample of a shard begins."""
    return lambda data: struct.unpack_from("<I", data, 4 + 4 * number)[0] + offset


# Values of samples: sizes of id, input_ids and zzz; id; type, shape and ids of input_ids; ...
IDS = 12 + len("doc 0")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "expected [\\d,]+ bytes, as index.json says"),
        (patch(0, 21), "expected 20 samples, as index.json says"),
        (patch(4, 2**32 - 1), "expected samples one after another"),
        (patch(4, 3), "expected samples one after another"),
        (patch(12, 0), "expected samples one after another"),
        (patch(sample(0), 2**32 - 1), "expected values that fill their samples"),
        (patch(sample(3, 4), 0), "expected values that fill their samples"),
        (patch(sample(0, IDS), 99, "B"), "expected ids of one integer type"),
        (patch(sample(0, IDS), 34, "B"), "expected ids of one integer type"),
        (patch(sample(0, IDS + 1), 2 << 2, "B"), "expected arrays of one dimension"),
        (patch(sample(0, IDS + 1), 1 << 2 | 3, "B"), "expected arrays inside of their samples"),
        (patch(sample(0, IDS + 2), 255, "B"), "expected arrays inside of their samples"),
        (patch(sample(0, IDS + 2), 1, "B"), "expected values of input_ids that consist of ids"),
    ],
)
def test_damaged_shards_are_named(tmp_path, damage, message):
    folder = write_mds(tmp_path / "data", {"input_ids": "ndarray", **OTHERS}, samples())
    shard = folder / "shard.00000.mds"
    shard.write_bytes(damage(shard.read_bytes()))
    with pytest.raises(DamagedDataError, match=rf"shard\.00000\.mds: {message}"):
        open_all(folder)


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"input_ids": "ndarray"}, {"column": "ids"}, r"a column ids .*, got input_ids \(nda"),
        ({"input_ids": "ndarray"}, {"dtype": "uint16"}, "ids of type uint16 .*, got int32"),
        (OTHERS, {"column": "id"}, "id of encoding ndarray or bytes, got str"),
        ({"zzz": "bytes"}, {"column": "zzz", "dtype": "uint16"}, "consist of ids of type uint16"),
    ],
)
def test_options_that_do_not_fit_are_named(tmp_path, columns, options, message):
    folder = write_mds(tmp_path / "data", columns, samples())
    with pytest.raises(DamagedDataError, match=rf"\d\.mds: expected .*{message}"):
        open_all(folder, **options)


def test_a_missing_shard_is_named(tmp_path):
    folder = write_mds(tmp_path / "data", {"input_ids": "ndarray"}, samples())
    (folder / "shard.00001.mds").unlink()
    with pytest.raises(DamagedDataError, match=r"shard\.00001\.mds does not exist; expected"):
        open_all(folder)


@pytest.mark.parametrize("encoding", ["ndarray", "ndarray:uint16", "ndarray:int64"])
@pytest.mark.parametrize("compression", [None, "gz", "zstd"])
def test_files_of_mosaicml_streaming(tmp_path, encoding, compression):
    streaming = pytest.importorskip("streaming")
    if compression == "zstd":
        pytest.importorskip("backports.zstd")
    columns = {"input_ids": encoding, **OTHERS}
    kind = encoding.partition(":")[2] or "int32"
    with streaming.MDSWriter(
        out=str(tmp_path / "data"), columns=columns, compression=compression, size_limit=4096
    ) as writer:
        for one in samples(kind):
            writer.write(one)
    assert open_all(tmp_path / "data") == SEQUENCES


def test_a_forged_shape_is_named():
    data, at, sizes = np.zeros(10, np.uint8), np.array([0]), np.array([10])
    for shape in ("9" * 30, "4294967296,4294967296"):
        with pytest.raises(ValueError, match="arrays inside of their samples"):
            mds._arrays(data, at, sizes, "uint16", shape)
