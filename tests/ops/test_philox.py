"""The dropout masks: the published Philox, the same mask everywhere, and the exact keep rate."""

import numpy as np
import pytest
import torch

from bert_unpad import ops
from tests.support import reference
from tests.support.seeds import derived

ONES, PI = 2**32 - 1, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)


@pytest.mark.parametrize(
    ("rounds", "numbers", "want"),
    [
        (7, (0,) * 6, [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]),
        (7, (ONES,) * 6, [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]),
        (7, PI, [0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A]),
        (10, (0,) * 6, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (10, (ONES,) * 6, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (10, PI, [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
    ],
)
def test_reference_gives_the_published_vectors(
    rounds: int, numbers: tuple[int, ...], want: list[int]
) -> None:
    """Known-answer vectors of Random123 (kat_vectors, philox4x32)."""
    words = reference.philox(numbers[:4], numbers[4:], rounds)
    assert [int(w) for w in words] == want


def _attention_keep(lengths: list[int], heads: int, p: float, rng: torch.Tensor) -> torch.Tensor:
    """The operator's mask: with v = identity the output is the dropped weights themselves."""
    size = max(lengths)
    total = sum(lengths)
    qkv = torch.zeros(total, 3, heads, size)
    start = 0
    for n in lengths:
        qkv[start : start + n, 2] = torch.eye(n, size)[:, None]
        start += n
    cu = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    return ops.varlen_attention(qkv, cu, size, dropout_p=p, rng=rng) != 0


# The rule has another form at the last two (KeepRule of csrc/common/philox.h).
RATES = [0.01, 0.1, 0.5, 0.9, 31745 / 65536, 0.99]


@pytest.mark.parametrize("p", RATES)
def test_attention_mask_is_the_reference_bit_for_bit(p: float) -> None:
    lengths, heads = [1, 15, 16, 17, 63, 64, 65, 127, 128], 3
    rng = torch.tensor([-(2**62) - 12345, 2**40 + 77])
    kept = _attention_keep(lengths, heads, p, rng)
    start = 0
    for sequence, n in enumerate(lengths):
        for h in range(heads):
            expected = reference.attention_mask(rng, p, sequence * heads + h, n, n)
            assert torch.equal(kept[start : start + n, h, :n], expected), (n, h)
        start += n


@pytest.mark.parametrize("p", RATES)
@pytest.mark.parametrize("hidden", [1, 7, 8, 100, 768])
def test_row_mask_is_the_reference_bit_for_bit(hidden: int, p: float) -> None:
    rng = torch.tensor([2**63 - 1, -3])
    rows = 33
    # The embedding operator drops after LayerNorm: weight 0, bias 1 leaves the mask itself.
    ids = torch.zeros(rows, dtype=torch.int64)
    table = torch.randn(2, hidden)
    norm = (torch.zeros(hidden), torch.ones(hidden))
    out = ops.embedding_layer_norm(*[ids] * 3, *[table] * 3, *norm, dropout_p=p, rng=rng)
    kept = reference.row_mask(rng, p, rows, hidden)
    assert torch.equal(out != 0, kept)
    if kept.any():
        assert out.max().item() == pytest.approx(reference.dropout_scale(p))


@pytest.mark.parametrize("p", [0.1, 0.25, 0.5])
def test_keep_rate_is_exact(p: float) -> None:
    kept = reference.row_mask(torch.tensor([11, 5]), p, 2000, 1000).double().mean().item()
    rate = reference.keep_threshold(p) / 65536
    assert rate == pytest.approx(1 - p, abs=1e-5)
    assert kept == pytest.approx(rate, abs=5 * (p * (1 - p) / 2e6) ** 0.5)


def test_masks_differ_between_calls_heads_and_sequences() -> None:
    rng = torch.tensor([1, 2])
    first = reference.attention_mask(rng, 0.5, 0, 64, 64)
    for other in (
        reference.attention_mask(rng, 0.5, 1, 64, 64),
        reference.attention_mask(torch.tensor([1, 3]), 0.5, 0, 64, 64),
        reference.attention_mask(torch.tensor([2, 2]), 0.5, 0, 64, 64),
        reference.row_mask(rng, 0.5, 64, 64),
    ):
        assert 0.4 < (first == other).double().mean().item() < 0.6


def test_manual_seed_repeats_a_mask() -> None:
    qkv = torch.randn(40, 3, 2, 16)
    cu = torch.tensor([0, 40], dtype=torch.int32)

    def run(seed: int) -> torch.Tensor:
        torch.manual_seed(derived(seed))
        return ops.varlen_attention(qkv, cu, 40, dropout_p=0.5)

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
