"""Who gets which counters (csrc/cuda/tickets.h), on the model of the CUDA runtime."""

import ctypes
import itertools

import pytest

from gpu_model import build
from gpu_model.block_model import Model


class Tickets:
    def __init__(self) -> None:
        self.model = Model(build.load(build.KERNELS / "tickets.cpp"))

    def take(self, stream: int, count: int, *, capturing: bool = False) -> range:
        """Their addresses; they are all zero."""
        first = ctypes.c_void_p()
        self.model.call("take_tickets", stream, count, capturing, ctypes.byref(first))
        begin = first.value or 0
        assert not any(ctypes.string_at(begin, 4 * count))
        return range(begin, begin + 4 * count)


@pytest.fixture(scope="module")
def tickets() -> Tickets:
    return Tickets()


def apart(*ranges: range) -> bool:
    ordered = sorted(ranges, key=lambda r: r.start)
    return all(a.stop <= b.start for a, b in itertools.pairwise(ordered))


def test_kernels_of_a_stream_share_and_streams_do_not(tickets):
    first = tickets.take(1, 10)
    assert tickets.take(1, 7).start == first.start
    assert apart(first, tickets.take(2, 10), tickets.take(3, 100))
    assert tickets.take(1, 10) == first


def test_a_stream_gets_more_when_it_needs_more(tickets):
    small, large = tickets.take(4, 3), tickets.take(4, 100_000)
    assert apart(small, large)
    assert tickets.take(4, 3).start == large.start


def test_what_is_captured_shares_with_nothing(tickets):
    eager = tickets.take(5, 20)
    captured = [tickets.take(5, 20, capturing=True) for _ in range(5)]
    assert apart(eager, *captured)
    assert tickets.take(5, 20) == eager
    assert apart(*captured, tickets.take(6, 20_000), *(tickets.take(5, 40_000, capturing=True),))


def test_none(tickets):
    assert len(tickets.take(7, 0)) == 0
