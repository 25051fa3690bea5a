"""TFRecord files of BERT examples as tests make them, after the formats' descriptions alone."""

import struct

from tests.support.masked_examples import LONGEST, PREDICTIONS


def slow_crc(data):
    """CRC-32C bit by bit, masked as TensorFlow does."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def varint(value):
    value &= 2**64 - 1  # negative numbers take 10 bytes
    out = []
    while value >= 128:
        out.append(value % 128 + 128)
        value //= 128
    return bytes([*out, value])


def message(field, data):
    return varint(8 * field + 2) + varint(len(data)) + data


def feature(values, packed=True):
    """A Feature: a FloatList for numbers of type float, otherwise an Int64List."""
    if isinstance(values[0], float):
        data = struct.pack(f"<{len(values)}f", *values)
        return message(2, message(1, data))
    if packed:
        return message(3, message(1, b"".join(map(varint, values))))
    return message(3, b"".join(varint(8) + varint(value) for value in values))


def example(features, packed=True):
    entries = [
        message(1, message(1, name.encode()) + message(2, feature(values, packed)))
        for name, values in features.items()
    ]
    return message(1, b"".join(entries))


def head(size):
    """What stands before a record of so many bytes."""
    data = struct.pack("<Q", size)
    return data + struct.pack("<I", slow_crc(data))


def frame(record):
    return head(len(record)) + record + struct.pack("<I", slow_crc(record))


def features_of(raw, without=()):
    """The padded features of an example."""
    ids, segments, positions, labels, following = raw

    def padded(values, size):
        return [*map(int, values), *[0] * (size - len(values))]

    features = {
        "input_ids": padded(ids, LONGEST),
        "input_mask": padded([1] * len(ids), LONGEST),
        "segment_ids": padded(segments, LONGEST),
        "masked_lm_positions": padded(positions, PREDICTIONS),
        "masked_lm_ids": padded(labels, PREDICTIONS),
        "masked_lm_weights": [float(i < len(labels)) for i in range(PREDICTIONS)],
        "next_sentence_labels": [following],
    }
    return {name: values for name, values in features.items() if name not in without}


def write_records(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(map(frame, records)))
    return path
