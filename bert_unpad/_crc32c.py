"""CRC-32C (Castagnoli), the checksum of TensorFlow's files, fast enough for whole checkpoints.

A loop in Python takes about a minute for the 440 MB of BERT-base. A CRC is linear, so numpy
advances up to 16,384 parts of the data side by side, 4 bytes per step, and joins their registers in
pairs.
"""

import functools
from collections.abc import Sequence

import numpy as np

_POLYNOMIAL = 0x82F63B78  # Castagnoli's polynomial with reversed bits
_MAX_LANES = 2**14  # registers and indices of a step fit into the second-level cache
_MIN_LANE = 64  # bytes; shorter lanes cost more to join than they save
_MASK_DELTA = 0xA282EAD8  # LevelDB masks CRCs, because the CRC of data that holds CRCs is weak


def masked_crc32c(data: bytes | np.ndarray) -> int:
    """Masks a CRC as LevelDB and TensorFlow do: rotated right by 15 bits, plus a constant."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def crc32c(data: bytes | np.ndarray) -> int:
    """Computes the CRC-32C of bytes or of a contiguous uint8 array."""
    rest = np.frombuffer(data, np.uint8)
    state = 0xFFFFFFFF
    while rest.size >= 2 * _MIN_LANE:
        lanes = min(_MAX_LANES, 1 << (rest.size // _MIN_LANE).bit_length() - 1)
        words = rest.size // (4 * lanes)
        end = 4 * lanes * words
        state = _advance(rest[:end].view("<u4").reshape(lanes, words), state)
        rest = rest[end:]
    table = _byte_table()
    for byte in rest.tolist():
        state = int(table[(state ^ byte) & 0xFF]) ^ state >> 8
    return state ^ 0xFFFFFFFF


def _advance(lanes: np.ndarray, state: int) -> int:
    """Returns the register after all words of all lanes [n, words] in order; n a power of two."""
    low, high = _word_tables()
    registers = np.zeros(len(lanes), np.uint32)
    registers[0] = state
    for column in np.ascontiguousarray(lanes.T):
        registers ^= column
        registers = low[registers & 0xFFFF] ^ high[registers >> 16]
    operator = _zeros(4 * lanes.shape[1])
    while len(registers) > 1:
        registers = _apply(operator, registers[::2]) ^ registers[1::2]
        operator = _apply(operator, operator)
    return int(registers[0])


def masked_crc32c_of(pieces: Sequence[bytes]) -> np.ndarray:
    """Computes the masked CRC-32C of each of many short pieces side by side, uint32 [pieces].

    Zeros before a piece change nothing while the register is 0, so pieces of all sizes end
    together. That the register begins with ones is the same as inverting the first 4 bytes.
    """
    sizes = [len(piece) for piece in pieces]
    width = -(-max(sizes, default=0) // 4) * 4
    data = np.zeros((len(pieces), width), np.uint8)
    for row, piece, size in zip(data, pieces, sizes, strict=True):
        row[width - size :] = np.frombuffer(piece, np.uint8)
        row[width - size : width - size + 4] ^= 0xFF
    low, high = _word_tables()
    registers = np.zeros(len(pieces), np.uint32)
    for column in np.ascontiguousarray(data.view("<u4").T):
        registers ^= column
        registers = low[registers & 0xFFFF] ^ high[registers >> 16]
    crcs = ~registers
    masked = (crcs >> 15 | crcs << 17) + np.uint32(_MASK_DELTA)
    for number, size in enumerate(sizes):
        if size < 4:  # nothing to invert in the rest of the register
            masked[number] = masked_crc32c(pieces[number])
    return masked


@functools.cache
def _byte_table() -> np.ndarray:
    """Returns what each low byte of a register adds to it in a shift by 8 bits, uint32 [256]."""
    table: np.ndarray = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = table >> 1 ^ np.where(table & 1, np.uint32(_POLYNOMIAL), np.uint32(0))
    return table


@functools.cache
def _word_tables() -> tuple[np.ndarray, np.ndarray]:
    """Returns what each low and each high half adds in a shift by 32 bits, uint32 [65536] each."""
    table = _byte_table()
    high = np.arange(2**16, dtype=np.uint32)
    for _ in range(2):
        high = table[high & 0xFF] ^ high >> 8
    return high[high & 0xFFFF] ^ high >> 16, high


def _zeros(count: int) -> np.ndarray:
    """Returns the effect of `count` zero bytes on each bit of a register, uint32 [32]."""
    result = np.uint32(1) << np.arange(32, dtype=np.uint32)
    power = _byte_table()[result & 0xFF] ^ result >> 8
    while count:
        if count & 1:
            result = _apply(power, result)
        power = _apply(power, power)
        count >>= 1
    return result


def _apply(operator: np.ndarray, values: np.ndarray) -> np.ndarray:
    out = np.zeros_like(values)
    for bit in range(32):
        out ^= np.where(values >> np.uint32(bit) & 1, operator[bit], np.uint32(0))
    return out
