"""What predictions for a GPU are made of, measured in a minute.

    python -m benchmarks.calibrate

The matrix products of a BERT-large step, in bf16 and 8 bits, with every epilogue that linear layers
use; the rate of a copy; the time from one small kernel to the next, launched one by one and in a
CUDA graph; the clock of the multiprocessors under load. Writes
benchmarks/results/<device>/calibrate.json, which `benchmarks.cuda_step` shows beside its model.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch

from benchmarks.lib import harness, timers
from benchmarks.lib.cuda_model_cases import wikipedia_mix
from benchmarks.lib.step_products import (
    SEQUENCES,
    Layer,
    bf16_products,
    fp8_products,
    layers,
)

ROUNDS, WARMUP = 20, 3
# A chain of kernels that do nothing for so many cycles, which is longer than the host takes to
# launch one.
CHAIN, CYCLES = 64, 20_000
TRIES = 5
LOAD_SECONDS = 3.0


class Device(timers.Timer, Protocol):
    """What is measured on; see `Gpu`."""

    name: str

    def chain(self, cycles: int, graph: bool) -> float:
        """Seconds of CHAIN kernels of so many cycles each, one after the other."""

    def under_load(self) -> dict[str, float | None]:
        """FLOP/s of a long run of large products, and the clock in it, in Hz."""


class Gpu(timers.CudaTimer):
    """The current GPU."""

    name = "cuda"

    def chain(self, cycles: int, graph: bool) -> float:
        def launch() -> None:
            for _ in range(CHAIN):
                torch.cuda._sleep(cycles)

        if graph:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                launch()
            return self._best(captured.replay, TRIES)
        return self._best(launch, TRIES)

    def under_load(self) -> dict[str, float | None]:
        size, done = 8192, 0
        a, b = (torch.randn(size, size, device="cuda").bfloat16() for _ in range(2))
        out = torch.empty_like(a)
        torch.cuda.synchronize()
        clocks = _ClockReader()
        begin = time.perf_counter()
        while time.perf_counter() - begin < LOAD_SECONDS:
            for _ in range(50):
                torch.mm(a, b, out=out)
            torch.cuda.synchronize()
            done += 50
        seconds = time.perf_counter() - begin
        return {"product_rate": 2 * size**3 * done / seconds, "sm_clock": clocks.stop()}


class _ClockReader:
    """nvidia-smi, which notes the clock of the multiprocessors while something else runs."""

    def __init__(self) -> None:
        self._process = None
        if (tool := shutil.which("nvidia-smi")) is not None:
            gpu = f"GPU-{torch.cuda.get_device_properties().uuid}"
            query = ["--query-gpu=clocks.sm", "--format=csv,noheader,nounits", "--loop-ms=100"]
            self._process = subprocess.Popen(
                [tool, "-i", gpu, *query], stdout=subprocess.PIPE, text=True
            )

    def stop(self) -> float | None:
        """The clock in Hz, by the median of the second half; None where it cannot be read."""
        if self._process is None:
            return None
        self._process.terminate()
        return median_clock(self._process.communicate()[0])


def median_clock(said: str) -> float | None:
    """Of what nvidia-smi printed, a line of MHz each time, without the first half."""
    read = [float(line) for line in said.split() if line.isdigit()]
    return 1e6 * statistics.median(read[len(read) // 2 :]) if read else None


def products(device: Device, wanted: Iterable[Layer]) -> Iterator[dict[str, Any]]:
    """Times of each layer's products."""
    for layer in wanted:
        kinds = {"bfloat16": bf16_products}
        if layer.encoder:
            kinds["float8"] = fp8_products
        for dtype, make in kinds.items():
            timings = timers.interleave(device, make(layer, device.name), ROUNDS, WARMUP)
            for which, epilogue in layer.epilogues().items():
                # In 8 bits only the bias is added by a product.
                done = epilogue if dtype == "bfloat16" or epilogue == "bias" else "none"
                yield {
                    "layer": layer.name,
                    "pass": which,
                    "dtype": dtype,
                    "epilogue": done,
                    "flops": layer.flops,
                    "seconds": timings[which].median,
                }


def gap(device: Device, graph: bool) -> float:
    """Seconds from one small kernel's end to the next one's start.

    From chains of kernels of one length and of twice that: what remains is not the kernels'.
    """
    once, twice = (device.chain(factor * CYCLES, graph) for factor in (1, 2))
    return (2 * once - twice) / CHAIN


def measure(device: Device, wanted: Iterable[Layer]) -> dict[str, Any]:
    """All that the file has to say."""
    return {
        "copy": device.copy_peak(),
        "gaps": {"launches": gap(device, False), "graph": gap(device, True)},
        **device.under_load(),
        "products": list(products(device, wanted)),
    }


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    device = Gpu()
    harness.time_algorithms()  # as the trainer does
    found = measure(device, layers(sum(wikipedia_mix(SEQUENCES))))
    for row in found["products"]:
        print(
            f"{row['layer']:32s}{row['pass']:17s}{row['dtype']:10s}{row['epilogue']:24s}"
            f"{1e6 * row['seconds']:8.1f} us{row['flops'] / row['seconds'] / 1e12:7.0f} TFLOP/s"
        )
    clock = "not read" if found["sm_clock"] is None else f"{found['sm_clock'] / 1e6:.0f} MHz"
    gaps = ", ".join(f"{1e6 * value:.2f} us ({name})" for name, value in found["gaps"].items())
    print(f"copy {found['copy'] / 1e12:.2f} TB/s; between kernels {gaps}; under load {clock}, "
          f"{found['product_rate'] / 1e12:.0f} TFLOP/s")  # fmt: skip
    path = harness.save("calibrate", harness.gpu_folder(), harness.command(), found)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
