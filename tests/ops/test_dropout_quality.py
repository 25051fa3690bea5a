"""Whether dropout's decisions are as good as independent ones, with the operators' own counters.

Statistics are in units of their standard deviations (z) under independence; seeds are fixed.
"""

import numpy as np
import pytest
import torch

from tests.support import reference
from tests.support.seeds import derived

KEY = (0x01234567, 0x89ABCDEF)
RNG = torch.tensor([12345, 678])
# Counters of 8 heads of a sequence of 512 tokens: row words, column words, streams.
GRID = (256, 64, 8)


def calls(rounds: int, offset: int = 3) -> np.ndarray:
    """Words of all calls of the grid, uint32 [*GRID, 4]."""
    row, column, stream = np.meshgrid(*map(np.arange, GRID), indexing="ij")
    words = reference.philox((row, column, 1 + stream, offset), KEY, rounds)
    return np.stack(words, axis=-1).astype(np.uint32)


def bits_of(words: np.ndarray) -> np.ndarray:
    """float32 [..., 128] of 1 and -1."""
    bits = np.unpackbits(words.astype("<u4").view(np.uint8), axis=-1, bitorder="little")
    return 2 * bits.astype(np.float32) - 1


def overall(z: np.ndarray) -> float:
    """Whether many z together are larger than they should be."""
    return float((np.square(z, dtype=np.float64).sum() - z.size) / (2 * z.size) ** 0.5)


def frequency(words: np.ndarray) -> np.ndarray:
    bits = bits_of(words).reshape(-1, 128)
    return bits.sum(0) / len(bits) ** 0.5


def windows(words: np.ndarray) -> np.ndarray:
    """Chi-square of the values of each decision's 16 bits."""
    parts = [words[..., i].ravel().astype(np.uint64) for i in range(4)]
    z = []
    for decision in range(16):
        counts = np.bincount(
            reference.decision_bits(parts, np.array(decision)).astype(np.int64), minlength=65536
        )
        expected = counts.sum() / 65536
        chi_square = np.square(counts - expected).sum() / expected
        z.append((chi_square - 65535) / (2 * 65535) ** 0.5)
    return np.array(z)


def pairs(words: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Correlations of every bit of one call with every bit of another one, or of the same."""
    a, b = (torch.from_numpy(bits_of(w).reshape(-1, 128)) for w in (words, other))
    z = (a.T @ b / len(a) ** 0.5).numpy()
    return z[np.triu_indices(128, 1)] if other is words else z.ravel()


def neighbours(words: np.ndarray, next_step: np.ndarray) -> np.ndarray:
    """Calls whose counters differ by 1 in a row word, column word, stream or offset."""
    z = [pairs(words, words), pairs(words, next_step)]
    for axis in range(3):
        z.append(pairs(np.roll(words, 1, axis), words))
    return np.concatenate(z)


def avalanche(rounds: int) -> np.ndarray:
    """How often a bit of the result changes with each bit of the counter and the key."""
    generator = np.random.default_rng(derived(0))
    counter = [generator.integers(0, size, 4096) for size in (*GRID, 1000)]
    base = np.stack(reference.philox(counter, KEY, rounds), axis=-1).astype(np.uint32)
    z = []
    for bit in range(192):
        changed, key = [c.copy() for c in counter], list(KEY)
        if bit < 128:
            changed[bit // 32] ^= 1 << bit % 32
        else:
            key[(bit - 128) // 32] ^= 1 << bit % 32
        words = np.stack(reference.philox(changed, tuple(key), rounds), axis=-1).astype(np.uint32)
        z.append(bits_of(words ^ base).sum(0) / len(base) ** 0.5)
    return np.concatenate(z)


def statistics(rounds: int) -> dict[str, np.ndarray]:
    words = calls(rounds)
    return {
        "frequency": frequency(words),
        "windows": windows(words),
        "neighbours": neighbours(words, calls(rounds, offset=4)),
        "avalanche": avalanche(rounds),
    }


@pytest.mark.parametrize("rounds", [7, 10])
def test_the_generator_passes(rounds: int) -> None:
    for name, z in statistics(rounds).items():
        assert np.abs(z).max() < 6.5, name  # of 25,000: one run in a million is beyond
        assert abs(overall(z)) < 5, name


def test_fewer_rounds_are_found_out() -> None:
    assert max(np.abs(z).max() for z in statistics(rounds=3).values()) > 20


def test_every_rate_is_exact() -> None:
    every = np.arange(65536)
    edges = [0, 1, 2046, 2047, 31744, 31745, 31746, 33790, 33791, 33792, 63489, 65535, 65536]
    for threshold in edges + list(range(7, 65536, 997)):
        assert reference.keeps(every, threshold).sum() == threshold


def correlation_of_neighbours() -> np.ndarray:
    """That of two decisions that share a byte, exactly, for 1 to 63,489 numbers below the limit.

    One has the byte as its upper half, the other one as its lower half; the other halves are
    independent.
    """
    numbers = np.arange(65536, dtype=np.uint16).view(np.float16)
    order = np.argsort(np.where(np.isnan(numbers), np.inf, numbers), kind="stable")[:63489]
    upper, lower, both, found = [0.0] * 256, [0.0] * 256, 0.0, []
    for count, number in enumerate(order.tolist(), 1):
        # upper[b]: how likely what has b as its upper half is below; both: sum of the products.
        upper[number >> 8] += 1 / 256
        both += lower[number >> 8] / 256
        lower[number & 255] += 1 / 256
        both += upper[number & 255] / 256
        rate = count / 65536
        found.append((both / 256 - rate**2) / (rate * (1 - rate)))
    return np.array(found)


def test_decisions_that_share_a_byte_are_hardly_correlated_at_any_rate() -> None:
    found = correlation_of_neighbours()
    assert np.abs(found).max() < 0.005
    assert np.abs(found).max() > 0.003  # and not because nothing is shared


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].item()


def masks_of_heads(p: float, rng: torch.Tensor = RNG) -> torch.Tensor:
    masks = [reference.attention_mask(rng, p, stream, 512, 512) for stream in range(8)]
    return torch.stack(masks).double()


@pytest.mark.parametrize("p", [0.02, 0.1, 0.5])
def test_masks_of_neighbours(p: float) -> None:
    """Of weights up to two tiles apart, of the next head, the next step, and of hidden states."""
    masks, next_step = masks_of_heads(p), masks_of_heads(p, RNG + torch.tensor([0, 1]))
    rows = reference.row_mask(RNG, p, 2048, 768).double()
    found = {"head": correlation(masks[1:], masks[:-1]), "step": correlation(masks, next_step)}
    for dr, dc in [(0, 1), (0, 2), (0, 9), (0, 15), (0, 16), (0, 32), (1, 0), (8, 0), (16, 0)]:
        found[f"{dr}, {dc}"] = correlation(masks[:, dr:, dc:], masks[:, : 512 - dr, : 512 - dc])
    for dr, dc in [(0, 1), (0, 7), (0, 8), (0, 16), (1, 0)]:
        found[f"hidden {dr}, {dc}"] = correlation(rows[dr:, dc:], rows[: 2048 - dr, : 768 - dc])
    assert max(map(abs, found.values())) < 0.005, found


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_counts_in_blocks_vary_as_independent_ones_do(p: float) -> None:
    rate = reference.keep_threshold(p) / 65536
    masks = masks_of_heads(p)
    for height, width in [(1, 16), (1, 32), (8, 8), (16, 1), (16, 32), (64, 64)]:
        blocks = masks.view(8, 512 // height, height, 512 // width, width).sum((2, 4)).flatten()
        size = height * width
        ratio = blocks.var().item() / (size * rate * (1 - rate))
        # Of a variance over n blocks the relative deviation is (2 / n) ** 0.5.
        assert abs(ratio - 1) < 0.01 + 5 * (2 / blocks.numel()) ** 0.5, (height, width)
        excess = (blocks - blocks.mean()).square()
        squares = correlation(excess[1:], excess[:-1])
        assert abs(squares) < 0.005 + 5 / blocks.numel() ** 0.5, (height, width)
