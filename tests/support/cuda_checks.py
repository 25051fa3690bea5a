"""Checks that the GPU tests of several operators share."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

GPU_ONLY = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
NEEDS_TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@contextmanager
def raise_if_the_host_waits(check: bool = True) -> Iterator[None]:
    """An operation that makes the host wait for the device raises RuntimeError, if `check`."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error" if check else "default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_same_bits(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def assert_runs_on_the_current_stream(
    run: Callable[[Tensor], Sequence[Tensor]], operand: Tensor
) -> None:
    """`run` must see what the stream writes into its operand before, and be seen by what follows on
    the stream."""
    want = run(operand)
    late = torch.zeros_like(operand)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(operand)
        got = [x.clone() for x in run(late)]
    stream.synchronize()
    assert_same_bits(got, want)


def capture(run: Callable[[], Sequence[Tensor]]) -> tuple[Sequence[Tensor], Callable[[], None]]:
    """The tensors that a captured run writes, and what replays it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    return captured, graph.replay


def assert_graph_takes_new_values(
    run: Callable[[], Sequence[Tensor]], change: Callable[[], object]
) -> None:
    """A captured graph, replayed after `change` wrote into the operands of `run`, gives what `run`
    gives then, and something else than before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    captured, replay = capture(run)
    replay()
    assert_same_bits(captured, run())
    before = captured[0].clone()
    change()
    replay()
    assert_same_bits(captured, run())
    assert not torch.equal(captured[0], before)
