"""GPUs by name: memory, rates, and a price to start from.

Rates are dense (without structured sparsity), products of 16 bits and of 8 added up in fp32, from
NVIDIA's data sheets and white papers: A100, H100, H200, L4, L40S, V100, T4 (data sheets); B200 (an
eighth of the DGX B200, fp32 of the HGX B200, in their data sheets); GB200 (a 72nd of the GB200
NVL72, in its data sheet); GeForce RTX 3090, 4090 and 5090 (white papers of Ampere GA102, Ada and
RTX Blackwell), RTX 2080 Ti (Turing white paper); A10G (the data sheet that AWS publishes with its
G5 instances). They are peaks: what products reach of them is `PRODUCTS_SHARE`.
"""

from dataclasses import dataclass

from bert_unpad._capability import LEAST_CAPABILITY, Capability, reaches

PRODUCTS_SHARE: dict[Capability, dict[str, float]] = {
    (7, 0): {"16bit": 0.62, "8bit": 0.62},
    (8, 9): {"16bit": 0.62, "8bit": 0.57},
    (9, 0): {"16bit": 0.68, "8bit": 0.60},
    (10, 0): {"16bit": 0.5, "8bit": 0.25},
}
"""Share of the peak that an encoder's matrix products reach, from that compute capability on.
Those of A100 in 16 bits, of H100 and H200, and of B200 in 8 bits are fitted to published runs and
this package's measurements (benchmarks/check_published.py); others are taken from their neighbours,
and 16 bits on B200 is a guess."""

# The CUDA operators need this much, whatever the precision.
_LEAST_CAPABILITY = min(LEAST_CAPABILITY.values())


@dataclass(frozen=True)
class Card:
    """One model of GPU."""

    name: str
    memory_gb: float
    """Size of its memory, 10^9 bytes."""
    tflops_16bit: float
    """Peak of 16-bit products, 10^12 operations/s: of bf16 where it has that, else of fp16."""
    tflops_8bit: float
    """Peak of 8-bit products (fp8), 10^12 operations/s; 0: it has none."""
    tflops_fp32: float
    """Peak in fp32 without tensor cores, 10^12 operations/s."""
    bandwidth_gbs: float
    """Bandwidth of its memory, 10^9 bytes/s."""
    capability: Capability
    """Compute capability."""
    nvlink_gbs: float
    """Bandwidth of its NVLink in each direction, 10^9 bytes/s; 0: servers join them by PCIe."""
    price: float
    """US dollars per hour: a round figure of on-demand cloud prices of 2025, to compare cards by;
    prices differ by more than a factor of 3 between clouds, so give your own."""

    @property
    def has_bf16(self) -> bool:
        """Whether its tensor cores multiply bf16."""
        return reaches(self.capability, "bf16")

    @property
    def is_supported(self) -> bool:
        """Whether this package's CUDA operators run on it."""
        return self.capability >= _LEAST_CAPABILITY

    def peak(self, precision: str) -> float:
        """Operations/s of the products that a precision of the trainer trains with."""
        rates = {"fp32": self.tflops_fp32, "fp8": self.tflops_8bit}
        return 1e12 * rates.get(precision, self.tflops_16bit)

    def products_share(self, precision: str) -> float:
        """Share of `peak` that an encoder's matrix products reach; see `PRODUCTS_SHARE`."""
        begin = max(first for first in PRODUCTS_SHARE if first <= self.capability)
        return PRODUCTS_SHARE[begin]["8bit" if precision == "fp8" else "16bit"]


CARDS = {
    card.name: card
    for card in (
        Card("a100-40", 40, 312, 0, 19.5, 1555, (8, 0), 300, 2.0),
        Card("a100-80", 80, 312, 0, 19.5, 2039, (8, 0), 300, 2.5),
        Card("a100-pcie", 80, 312, 0, 19.5, 1935, (8, 0), 0, 2.0),
        Card("h100", 80, 989, 1979, 67, 3350, (9, 0), 450, 4.0),
        Card("h100-pcie", 80, 756, 1513, 51, 2000, (9, 0), 0, 3.0),
        Card("h200", 141, 989, 1979, 67, 4800, (9, 0), 450, 5.0),
        Card("b200", 180, 2250, 4500, 75, 8000, (10, 0), 900, 6.0),
        Card("gb200", 186, 2500, 5000, 80, 8000, (10, 0), 900, 7.0),
        Card("l4", 24, 121, 242, 30.3, 300, (8, 9), 0, 0.8),
        Card("a10g", 24, 70, 0, 35, 600, (8, 6), 0, 1.0),
        Card("l40s", 48, 362, 733, 91.6, 864, (8, 9), 0, 1.9),
        Card("rtx3090", 24, 71, 0, 35.6, 936, (8, 6), 0, 0.25),
        Card("rtx4090", 24, 165, 330, 82.6, 1008, (8, 9), 0, 0.4),
        Card("rtx5090", 32, 209.5, 419, 104.8, 1792, (12, 0), 0, 0.6),
        Card("v100", 32, 125, 0, 15.7, 900, (7, 0), 150, 3.0),
        Card("t4", 16, 65, 0, 8.1, 320, (7, 5), 0, 0.5),
        Card("rtx2080ti", 11, 53.8, 0, 13.4, 616, (7, 5), 0, 0.1),
    )
}
"""The cards by name; h100 is the SXM card."""


def find_card(name: str) -> Card:
    """The card of that name, if plans can be made for it.

    Raises:
        ValueError: it is not in the table, or this package's CUDA operators do not run on it.
    """
    if name not in CARDS:
        raise ValueError(f"argument --card: expected one of {', '.join(CARDS)}, got {name!r}")
    card = CARDS[name]
    if not card.is_supported:
        usable = ", ".join(known.name for known in CARDS.values() if known.is_supported)
        raise ValueError(
            f"argument --card: {name} has compute capability "
            f"{card.capability[0]}.{card.capability[1]}; the CUDA operators need "
            f"{_LEAST_CAPABILITY[0]}.{_LEAST_CAPABILITY[1]} or later, so there is nothing to plan "
            f"for it. Expected one of {usable}"
        )
    return card
