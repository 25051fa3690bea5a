"""Google's TensorFlow checkpoints, read and written without TensorFlow.

What the reader understands is checked against files put together here byte by byte from the
descriptions of the format, and with a CRC computed bit by bit.
"""

import json
import random
import struct

import pytest
import torch
from safetensors.torch import load_file

from bert_unpad._crc32c import crc32c, masked_crc32c_of
from bert_unpad.convert import google
from bert_unpad.convert.sstable import read_table, table
from bert_unpad.convert.tensor_bundle import TensorBundle, write_bundle
from tests.convert.test_convert import CONFIG, assert_same_tensors, checkpoint, run  # noqa: F401
from tests.support.seeds import derived


def slow_crc(data: bytes) -> int:
    state = 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = state >> 1 ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF


def masked(data: bytes) -> bytes:
    crc = slow_crc(data)
    return struct.pack("<I", ((crc >> 15) + (crc << 17) + 0xA282EAD8) % 2**32)


def test_crc32c():
    # RFC 3720, B.4, and the check value of the catalogue of CRCs.
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"") == 0
    rng = random.Random(derived(0))
    for size in (1, 127, 128, 129, 1000, 4099, 20001):
        data = rng.randbytes(size)
        assert crc32c(data) == slow_crc(data), size
    pieces = [rng.randbytes(size) for size in (0, 1, 3, 4, 5, 8, 31, 32, 700, 0)]
    assert [struct.pack("<I", crc) for crc in masked_crc32c_of(pieces)] == list(map(masked, pieces))
    assert len(masked_crc32c_of([])) == 0


def block(*entries: bytes, kind: bytes = b"\0") -> bytes:
    """A block with one restart, its type and its checksum; all numbers are below 128."""
    contents = b"".join(entries) + struct.pack("<II", 0, 1) + kind
    return contents + masked(contents)


def handle(offset: int, size: int) -> bytes:
    def number(value: int) -> bytes:
        return bytes([value]) if value < 128 else bytes([value & 127 | 128, value >> 7])

    return number(offset) + number(size)


def entry(shared: int, key: bytes, value: bytes) -> bytes:
    return bytes([shared, len(key), len(value)]) + key + value


ONES = struct.pack("<6f", 1, 2, 3, 4, 5, 6)
STEP = struct.pack("<q", 7)


def hand_made(tmp_path, kind: bytes = b"\0", header: bytes = b"\x08\x02\x1a\x02\x08\x01", **change):
    """A checkpoint of two tensors in two data files, whose index has two data blocks.

    Header: num_shards 2, version {producer 1}. ab/x: dtype 1, shape {dim {2} dim {3}}, offset 5,
    size 24, crc. ab/y: dtype 9, shape {}, shard_id 1, size 8, crc.
    """
    x = change.get("x", b"\x08\x01\x12\x08\x12\x02\x08\x02\x12\x02\x08\x03\x20\x05\x28\x18")
    x += b"\x35" + change.get("crc", masked(ONES)) + change.get("more", b"")
    y = b"\x08\x09\x12\x00\x18\x01\x28\x08\x35" + masked(STEP)
    first = block(entry(0, b"", header), entry(0, b"ab/x", x), kind=kind)
    second = block(entry(0, b"ab/y", y))
    meta = block()
    index = block(
        entry(0, b"ab/x", handle(0, len(first) - 5)),
        entry(3, b"z", handle(len(first), len(second) - 5)),  # any key not before ab/y will do
    )
    at = len(first) + len(second)
    footer = handle(at, len(meta) - 5) + handle(at + len(meta), len(index) - 5)
    magic = bytes.fromhex("57fb808b247547db")
    data = first + second + meta + index + footer.ljust(40, b"\0") + magic
    (tmp_path / "m.index").write_bytes(data)
    (tmp_path / "m.data-00000-of-00002").write_bytes(b"....." + ONES)
    (tmp_path / "m.data-00001-of-00002").write_bytes(STEP)
    return tmp_path / "m"


def test_reads_a_checkpoint_made_by_hand(tmp_path):
    bundle = TensorBundle(hand_made(tmp_path))
    assert bundle.keys() == ["ab/x", "ab/y"]
    assert torch.equal(bundle["ab/x"], torch.tensor([[1.0, 2, 3], [4, 5, 6]]))
    assert torch.equal(bundle["ab/y"], torch.tensor(7))
    assert bundle.shape("ab/x") == (2, 3)


def test_what_is_damaged_or_unknown_is_named(tmp_path):
    prefix = hand_made(tmp_path)
    index = (tmp_path / "m.index").read_bytes()
    data = tmp_path / "m.data-00000-of-00002"
    for damaged, message in (
        (index[:-1], "not a table, or cut off"),
        (b"", "not a table, or cut off"),
        (index[:20] + index[21:], "checksum|outside"),
        (index[:20] + bytes([index[20] ^ 1]) + index[21:], "checksum of the block at 0 is wrong"),
    ):
        (tmp_path / "m.index").write_bytes(damaged)
        with pytest.raises(ValueError, match=f"m.index: .*{message}"):
            TensorBundle(prefix)
    for change, message in (
        ({"kind": b"\1"}, "compressed with snappy"),
        ({"header": b"\x08\x02\x10\x01"}, "big-endian"),
        ({"header": b""}, "no header"),
    ):
        with pytest.raises(ValueError, match=message):
            TensorBundle(hand_made(tmp_path, **change))
    for change, message in (
        ({"crc": b"abcd"}, "m.data-00000-of-00002 is damaged: the checksum of ab/x is wrong"),
        ({"more": b"\x3a\x00"}, "ab/x is stored in slices"),
        ({"x": b"\x08\x07\x28\x18"}, "dtype number 7"),
        ({"x": b"\x08\x01\x28\x18"}, r"ab/x: \[\] of torch.float32 are 4 bytes, got 24"),
    ):
        bundle = TensorBundle(hand_made(tmp_path, **change))
        with pytest.raises(ValueError, match=message):
            bundle["ab/x"]
        assert bundle["ab/y"] == 7
    bundle = TensorBundle(hand_made(tmp_path))
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(ValueError, match="00000-of-00002 is cut off: ab/x is at 5 to 29"):
        bundle["ab/x"]
    data.unlink()
    with pytest.raises(FileNotFoundError):
        bundle["ab/x"]


@pytest.mark.parametrize("block_size", [1, 200, 2**18])
def test_tables_of_any_number_of_blocks(block_size):
    rng = random.Random(derived(1))
    pairs = {rng.randbytes(rng.randrange(9)) * 2: rng.randbytes(rng.randrange(300))
             for _ in range(90)}  # fmt: skip
    assert read_table(table(pairs, block_size)) == pairs
    assert list(read_table(table(pairs, block_size))) == sorted(pairs)
    assert read_table(table({})) == {}


def test_every_dtype_and_shape_comes_back(tmp_path):
    torch.manual_seed(derived(0))
    tensors = {"scalar": torch.tensor(3.5), "empty": torch.ones(0, 4), "bool": torch.ones(3) > 0}
    for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8):
        tensors[f"a/{dtype}"] = (torch.randn(5, 3) * 50).abs().to(dtype)
    tensors["strided"] = torch.randn(4, 6).t()
    write_bundle(tmp_path / "m", tensors)
    bundle = TensorBundle(tmp_path / "m")
    assert_same_tensors({name: bundle[name] for name in bundle.keys()}, tensors)  # noqa: SIM118
    with pytest.raises(ValueError, match=r"c is torch.complex64, which TensorFlow does not have"):
        write_bundle(tmp_path / "m", {"c": torch.ones(2, dtype=torch.complex64)})


def test_google_and_back_bit_for_bit(checkpoint, tmp_path):  # noqa: F811
    target = tmp_path / "google" / "bert_model.ckpt"
    assert run(checkpoint, target, "--to", "google") == 0
    bundle = TensorBundle(target)
    shapes = {
        "bert/embeddings/word_embeddings": (61, 32),
        "bert/embeddings/LayerNorm/gamma": (32,),
        "bert/encoder/layer_1/attention/self/query/kernel": (32, 32),
        "bert/encoder/layer_1/attention/output/LayerNorm/beta": (32,),
        "bert/encoder/layer_1/intermediate/dense/kernel": (32, 48),
        "bert/encoder/layer_1/output/dense/bias": (32,),
        "bert/pooler/dense/kernel": (32, 32),
        "cls/predictions/transform/LayerNorm/beta": (32,),
        "cls/predictions/output_bias": (61,),
        "cls/seq_relationship/output_weights": (2, 32),
        "cls/seq_relationship/output_bias": (2,),
    }
    assert {name: bundle.shape(name) for name in shapes} == shapes
    tensors = load_file(checkpoint / "model.safetensors")
    query = tensors["bert.encoder.layer.1.attention.self.query.weight"]
    assert torch.equal(bundle["bert/encoder/layer_1/attention/self/query/kernel"], query.t())
    for number, source in enumerate((target, target.with_name("bert_model.ckpt.index"),
                                     target.parent)):  # fmt: skip
        assert run(source, tmp_path / f"hf{number}", "--from", "google") == 0
        assert_same_tensors(load_file(tmp_path / f"hf{number}" / "model.safetensors"), tensors)
    # Through the third layout and back, too.
    assert run(target, tmp_path / "n.pt", "--from", "google", "--to", "nvidia") == 0
    config = ("--config", tmp_path / "n.json")
    assert run(tmp_path / "n.pt", tmp_path / "b/x", "--from", "nvidia", "--to", "google", *config
               ) == 0  # fmt: skip
    for suffix in ("index", "data-00000-of-00001"):
        again = (tmp_path / "b" / f"x.{suffix}").read_bytes()
        assert again == target.with_name(f"bert_model.ckpt.{suffix}").read_bytes()


def test_an_optimizers_state_is_counted_and_the_unknown_listed(checkpoint, tmp_path, capsys):  # noqa: F811
    target = tmp_path / "google" / "bert_model.ckpt"
    assert run(checkpoint, target, "--to", "google") == 0
    bundle = TensorBundle(target)
    tensors = {name: bundle[name] for name in bundle.keys()}  # noqa: SIM118
    bias = tensors["bert/pooler/dense/bias"]
    tensors |= {"bert/pooler/dense/bias/adam_m": bias, "bert/pooler/dense/bias/adam_v": bias,
                "global_step": torch.tensor(5)}  # fmt: skip
    write_bundle(target, tensors)
    assert run(target.parent, tmp_path / "hf", "--from", "google") == 0
    assert "left out 3 tensors of an optimizer, from bert/pooler/dense/bias/adam_m on" in (
        capsys.readouterr().err
    )
    tensors["bert/odd/kernel"] = torch.ones(2, 3)
    del tensors["cls/seq_relationship/output_bias"]
    write_bundle(target, tensors)
    assert run(target.parent, tmp_path / "none", "--from", "google") == 1
    err = capsys.readouterr().err
    assert "unknown: bert/odd/kernel" in err
    assert "missing: cls.seq_relationship.bias" in err
    assert not (tmp_path / "none").exists()


def test_refuses(checkpoint, tmp_path, capsys):  # noqa: F811
    target = tmp_path / "google" / "bert_model.ckpt"
    assert run(checkpoint, target, "--to", "google") == 0
    write_bundle(target.with_name("second"), {"_CHECKPOINTABLE_OBJECT_GRAPH": torch.ones(1)})
    capsys.readouterr()
    for source, message in (
        (target.parent, "expected one checkpoint (*.index), got bert_model.ckpt.index, second"),
        (target.with_name("second"), "object-based checkpoint of TensorFlow 2"),
    ):
        assert run(source, tmp_path / "out", "--from", "google") == 1
        assert message in capsys.readouterr().err
    target.with_name(google.CONFIG_FILE).unlink()
    assert run(target, tmp_path / "out", "--from", "google") == 2
    assert "bert_config.json" in capsys.readouterr().err


def test_the_activation_that_the_weights_were_trained_with(checkpoint, tmp_path, capsys):  # noqa: F811
    target = tmp_path / "google" / "model.ckpt-28252"
    assert run(checkpoint, target, "--to", "google") == 0
    for given, noted in (((), "gelu"), (("--hidden-act", "gelu_new"), "gelu_new")):
        out = tmp_path / noted
        assert run(target, out, "--from", "google", *given) == 0
        assert json.loads((out / "config.json").read_text())["hidden_act"] == noted
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("gelu", "gelu_new")]
    assert_same_tensors(*weights)
    with pytest.raises(SystemExit):
        run(target, tmp_path / "out", "--from", "google", "--hidden-act", "tanh")
    assert "gelu_new" in capsys.readouterr().err
