"""Damaged and forged files end in the loaders' documented errors, and never lead to other files."""

import json
import os
import struct

import pytest
import torch
from safetensors.torch import save_file

from bert_unpad.convert import huggingface, nvidia
from bert_unpad.convert.sstable import read_table, table, write_varint
from bert_unpad.convert.tensor_bundle import TensorBundle, write_bundle
from bert_unpad.data import WordPieceTokenizer
from bert_unpad.data.sampling.histogram import read_histogram
from bert_unpad.data.streams.position import StreamPosition
from bert_unpad.nn import BertConfig, BertForPreTraining
from tests.convert.test_convert import CONFIG, checkpoint, run  # noqa: F401

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
BIAS = "bert.pooler.dense.bias"


def load_both_ways(folder):
    """The error of `from_pretrained`, which must be the one of a conversion too."""
    with pytest.raises(ValueError) as error:
        BertForPreTraining.from_pretrained(folder)
    with pytest.raises(ValueError) as other:
        huggingface.read(folder).check_tensors()
    assert str(other.value) == str(error.value)
    return str(error.value)


@pytest.mark.parametrize("kind", ["parent", "absolute", "folder", "backslash", "number", "list"])
def test_an_index_names_files_of_its_own_folder_only(checkpoint, tmp_path, kind):  # noqa: F811
    for place in (tmp_path, checkpoint / "sub"):
        place.mkdir(exist_ok=True)
        (place / "w.safetensors").write_bytes((checkpoint / WEIGHTS).read_bytes())
    (checkpoint / WEIGHTS).unlink()
    shard = {
        "parent": "../w.safetensors",
        "absolute": str(tmp_path / "w.safetensors"),
        "folder": "sub/w.safetensors",
        "backslash": "..\\w.safetensors",
        "number": 5,
        "list": ["w.safetensors"],
    }[kind]
    (checkpoint / INDEX).write_text(json.dumps({"weight_map": {BIAS: shard}}))
    assert f"{INDEX}: weight_map: {BIAS}: expected the name of a file in this folder, got" in (
        load_both_ways(checkpoint)
    )


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": []}', "{", "[" * 100_000, b"\xff"])
def test_a_damaged_index_is_named(checkpoint, text):  # noqa: F811
    (checkpoint / WEIGHTS).unlink()
    (checkpoint / INDEX).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert f"{checkpoint / INDEX}" in load_both_ways(checkpoint)


def test_links_of_a_cache_are_followed(checkpoint, tmp_path):  # noqa: F811
    (tmp_path / "blobs").mkdir()
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    os.rename(checkpoint / WEIGHTS, tmp_path / "blobs" / "b1")
    os.rename(checkpoint / "config.json", tmp_path / "blobs" / "b2")
    (snapshot / "model-1.safetensors").symlink_to("../../blobs/b1")
    (snapshot / "config.json").symlink_to("../../blobs/b2")
    (snapshot / INDEX).write_text(json.dumps({"weight_map": {BIAS: "model-1.safetensors"}}))
    found = BertForPreTraining.from_pretrained(snapshot).state_dict()
    assert set(huggingface.read(snapshot)) >= {BIAS}
    assert found[BIAS].any()


def forged_header(header: object) -> bytes:
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(data)) + data


@pytest.mark.parametrize(
    "forge",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data[:100],
        lambda data: struct.pack("<Q", 2**63 - 1) + data[8:],
        lambda data: forged_header(b"{no JSON"),
        lambda data: forged_header(b"[" * 100_000),
        lambda data: forged_header(
            {"x": {"dtype": "F32", "shape": [2**50], "data_offsets": [0, 8]}}
        ),
        lambda data: forged_header({"x": {"dtype": "F31", "shape": [0], "data_offsets": [0, 0]}}),
    ],
)
def test_damaged_safetensors_are_named(checkpoint, forge):  # noqa: F811
    file = checkpoint / WEIGHTS
    file.write_bytes(forge(file.read_bytes()))
    assert f"{file}: expected a complete safetensors file" in load_both_ways(checkpoint)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64])
def test_weights_are_of_floating_point(checkpoint, dtype):  # noqa: F811
    tensors = dict(huggingface.read(checkpoint))
    save_file(tensors | {BIAS: torch.ones(32, dtype=dtype)}, checkpoint / WEIGHTS)
    assert f"{BIAS}: expected floating point, got {dtype}" in load_both_ways(checkpoint)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 2**40),
        ("num_hidden_layers", 10**9),
        ("vocab_size", float("nan")),
        ("vocab_size", "61"),
        ("hidden_dropout_prob", "x"),
        ("hidden_dropout_prob", [0.1]),
        ("layer_norm_eps", float("inf")),
        ("initializer_range", None),
        pytest.param("initializer_range", 10**400, id="initializer_range-huge"),
        ("hidden_act", ["gelu"]),
    ],
)
def test_configurations_of_wrong_values_are_named(checkpoint, field, value):  # noqa: F811
    file = checkpoint / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    assert f"{file}: {field}: expected" in load_both_ways(checkpoint)


def test_no_memory_is_taken_for_a_configuration_that_does_not_fit(checkpoint, monkeypatch):  # noqa: F811
    file = checkpoint / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": 2**24}))
    made = []
    init = BertForPreTraining.__init__

    def watched(model, config):
        made.append(torch.get_default_device())
        init(model, config)

    monkeypatch.setattr(BertForPreTraining, "__init__", watched)
    with pytest.raises(
        ValueError, match=r"word_embeddings.weight: expected shape .* got \[61, 32\]"
    ):
        BertForPreTraining.from_pretrained(checkpoint)
    assert made == [torch.device("meta")]


BROKEN_JSON = [b"", b"{", b"[]", b"5", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000]


def read_tokenizer(path):
    (path.parent / "vocab.txt").write_text("[PAD]")
    WordPieceTokenizer.load(path.parent)


@pytest.mark.parametrize("data", BROKEN_JSON)
@pytest.mark.parametrize(
    ("name", "read"),
    [("config.json", BertConfig.from_json), ("tokenizer_config.json", read_tokenizer)],
)
def test_broken_json_is_named(tmp_path, name, read, data):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=f"^{tmp_path / name}:? "):
        read(tmp_path / name)


@pytest.fixture
def from_nvidia(checkpoint, tmp_path):  # noqa: F811
    """A file of NVIDIA's layout; changes its tensors, or its bytes, and reads it."""
    path = tmp_path / "model.pt"
    assert run(checkpoint, path, "--to", "nvidia") == 0
    tensors = torch.load(path, weights_only=True)["model"]

    def read(change=None, data=None, **options):
        if data is not None:
            path.write_bytes(data(path.read_bytes()))
        else:
            torch.save(change(tensors), path, **options)
        nvidia.read(path, tmp_path / "model.json").check_tensors()

    return read


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("keep", [0, 1, 9, 100, 2000, -1, -600])
def test_cut_off_nvidia_checkpoints_are_named(from_nvidia, tmp_path, new, keep):
    from_nvidia(lambda tensors: {"model": tensors}, _use_new_zipfile_serialization=new)
    with pytest.raises(ValueError, match=r"model\.pt: expected a complete file of tensors"):
        from_nvidia(data=lambda data: data[:keep])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: [1], "model.pt holds no state dict"),
        (lambda t: {1: torch.ones(2)}, "model.pt holds no state dict"),
        (lambda t: {"model": {**t, "a": 5}}, "model.pt holds no state dict"),
        (lambda t: {"model": {**t, "a": torch.eye(2).to_sparse()}}, "model.pt holds no state dict"),
        (lambda t: {**t, "a": torch.ones(1).expand(2**50)}, "model.pt holds no state dict"),
        (lambda t: {**t, "a": torch.ones(1, device="meta")}, "model.pt holds no state dict"),
        (
            lambda t: {**t, "cls.predictions.bias": torch.tensor(1.0)},
            r"bias: expected shape \[61\], got \[\]",
        ),
        (lambda t: {"a": torch.nn.Linear(2, 2)}, r"model\.pt: expected a complete file of tensors"),
    ],
)
def test_nvidia_checkpoints_of_wrong_content_are_refused(from_nvidia, change, message):
    with pytest.raises(ValueError, match=message):
        from_nvidia(change)


def test_altered_instructions_of_an_nvidia_checkpoint(from_nvidia):
    for old, new in ((b"bert.pooler", b"\xffert.pooler"), (b"FloatStorage", b"FloatSt0rage")):
        from_nvidia(lambda tensors: {"model": tensors}, _use_new_zipfile_serialization=False)
        with pytest.raises(ValueError, match=r"model\.pt: expected a complete file of tensors"):
            from_nvidia(data=lambda data, old=old, new=new: data.replace(old, new))


def message_of(number: int, *fields: tuple[int, int]) -> bytes:
    """Field `number` of a protocol buffer, whose value is a message of numbers."""
    inner = b"".join(write_varint(field << 3) + write_varint(value) for field, value in fields)
    return write_varint(number << 3 | 2) + write_varint(len(inner)) + inner


def numbers(*fields: tuple[int, int]) -> bytes:
    return b"".join(write_varint(field << 3) + write_varint(value) for field, value in fields)


def shape(*sizes: int) -> bytes:
    dimensions = b"".join(message_of(2, (1, size)) for size in sizes)
    return write_varint(2 << 3 | 2) + write_varint(len(dimensions)) + dimensions


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (numbers((1, 1), (5, 2**62)) + shape(2**60), "cut off: x is at 0 to"),
        (numbers((1, 1), (4, 2**63), (5, 4)) + shape(1), "cut off: x is at 9223372036854775808"),
        (numbers((1, 1), (5, 4)) + shape(2**64 - 1), "is no shape of a tensor"),
        (numbers((1, 1)) + shape(2**40, 2**40, 0), "is no shape of a tensor"),
        (numbers((1, 1), (5, 0)) + shape(2**32, 2**32), "is no shape of a tensor"),
        (message_of(1, (1, 1)), r"m\.index: expected a number in field 1"),
        (numbers((1, 1), (2, 5)), r"m\.index: expected a message within a message"),
        (b"\x28" + b"\xff" * 9 + b"\x7f", r"m\.index: a number has more than 64 bits"),
        (b"\x12\x7f", r"m\.index: a field reaches beyond its message"),
    ],
)
def test_forged_entries_of_a_tensorflow_checkpoint(tmp_path, entry, message):
    write_bundle(tmp_path / "m", {"x": torch.ones(4)})
    index = tmp_path / "m.index"
    index.write_bytes(table(read_table(index.read_bytes()) | {b"x": entry}))
    with pytest.raises(ValueError, match=message):
        TensorBundle(tmp_path / "m")["x"]


def test_a_small_table_cannot_stand_for_a_huge_one(monkeypatch):
    from bert_unpad.convert import sstable

    pairs = {b"k" * 1000 + bytes([i]): b"" for i in range(200)}
    monkeypatch.setattr(sstable, "_RESTART_INTERVAL", 10**9)  # all keys share 1,000 bytes
    data = table(pairs)
    assert read_table(data) == pairs
    monkeypatch.undo()
    with pytest.raises(ValueError, match="keys are longer than the table can hold"):
        read_table(data)
    handle = b"\0" + write_varint(8)  # an index that names the same block again and again
    append = sstable._append
    monkeypatch.setattr(sstable, "_append", lambda *args: append(*args) and handle)
    block = sstable._BlockWriter()
    for key in (b"a", b"b"):
        block.add(key, handle)
    out = bytearray()
    append(out, sstable._BlockWriter())
    at = append(out, block)
    footer = (handle + at).ljust(40, b"\0") + struct.pack("<Q", sstable._MAGIC)
    with pytest.raises(ValueError, match="the block at 0 begins within the one before"):
        read_table(bytes(out) + footer)


class _Stream:
    def identity(self):
        return {}

    def continue_after(self, epoch, past):
        raise AssertionError("not reached")


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": float("inf")},
        {"epoch": 2**70},
        {"positions": [float("nan")]},
        {"positions": [-1]},
        {"positions": 5},
        {"past": [[]]},
        {"past": [[float("inf")]]},
        {"stream": None},
    ],
)
def test_forged_stream_positions(change):
    state = {"version": 1, "epoch": 0, "positions": [0], "past": [], "stream": {}}
    with pytest.raises(ValueError, match=r"^state: "):
        StreamPosition.load(state | change, _Stream(), 1)


@pytest.mark.parametrize("data", [b"\xff", b"9" * 30, b"9" * 5000, b"-1", b"\n5"])
def test_damaged_histograms_are_named(tmp_path, data):
    (tmp_path / "h.txt").write_bytes(data)
    with pytest.raises(ValueError, match=r"h\.txt"):
        read_histogram(tmp_path / "h.txt")
