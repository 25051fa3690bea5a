"""The picture of a step's backward pass and communication."""

from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.lib import timeline
from tests.support import processes as mp


def recorded(rank: int, world_size: int) -> dict[str, timeline.Intervals]:
    """A backward pass, then an allreduce."""
    weight = torch.randn(64, 64, requires_grad=True)

    def step() -> None:
        (torch.randn(64, 64) @ weight).square().sum().backward()
        dist.all_reduce(weight.grad)

    step()
    return timeline.record(step)


def test_a_step_in_lanes(tmp_path: Path) -> None:
    lanes = mp.run_ranks(recorded, 2)[0]
    backward, communication = lanes["backward"], lanes["communication"]
    assert len(backward) >= 3  # sum, square, product
    assert len(communication) == 1
    assert all(0 <= begin <= end for begin, end in backward + communication)
    assert max(end for _, end in backward) <= communication[0][1]
    path = tmp_path / "picture.png"
    timeline.draw(path, {"none": lanes}, "1gbit")
    assert path.read_bytes().startswith(b"\x89PNG")
