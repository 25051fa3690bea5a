"""How the benchmarks measure memory: against a step whose needs are known."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import harness


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_a_known_step() -> None:
    weight = torch.zeros(1000, 1000, requires_grad=True)
    adam = torch.optim.Adam([weight])
    temporary = 80_000_000

    def step(size: int) -> None:
        adam.zero_grad(set_to_none=True)
        torch.ones(size, dtype=torch.uint8)
        weight.sum().backward()
        weight.grad = weight.grad.clone()
        adam.step()

    memory = harness.memory_of(adam, lambda: step(1), lambda: step(temporary))
    assert memory.state == pytest.approx(3 * weight.nbytes, abs=100)
    # The temporary is freed before the gradient is made.
    assert memory.step == pytest.approx(temporary, rel=0.2)
    assert memory.peak == memory.state + memory.step
