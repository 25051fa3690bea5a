"""The parts that a modelled step is added up of, and their time at any rates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from benchmarks.lib.gpu_rates import Rates
from gpu_model.sm.architectures import H100

# Multiply-adds count as two operations. Assumed for products of BERT-large's sizes: two thirds of
# the peak rate of 16-bit products (989 TFLOP/s, NVIDIA's data sheet of the H100 SXM5).
PRODUCT_RATE = 650e12
PRODUCTS = "matrix products"
MODEL = Rates(PRODUCT_RATE, H100.dram, H100.kernel_seconds, H100.clock)


class Part(NamedTuple):
    name: str
    launches: int
    seconds: float  # without the time between kernels
    why: str

    def at(self, rates: Rates) -> float:
        """Seconds with the time between kernels, of which attention's times have their own."""
        if self.name == PRODUCTS:
            scale = MODEL.products / rates.products
        elif self.launches:
            scale = MODEL.memory / rates.memory
        else:
            scale = MODEL.clock / rates.clock
        return scale * self.seconds + self.launches * rates.gap

    @property
    def whole(self) -> float:
        return self.at(MODEL)

    @property
    def row(self) -> list[str]:
        return [self.name, self.why, str(self.launches), f"{1e3 * self.whole:.2f}"]


def memory(name: str, launches: int, moved: float, why: str) -> Part:
    """Kernels that read and write so many bytes in all."""
    return Part(name, launches, moved / H100.dram, why)


def sum_at(rates: Rates, counted: Iterable[Part]) -> float:
    """Seconds of a step."""
    return sum(part.at(rates) for part in counted)
