"""Sums tensors over ranks in two hops: within each node first, then between nodes.

Each node sends one tensor over the network, however many ranks it has, and only one rank per node
uses the network. A flat ring through all ranks is as good if neighbours in the ring share a node;
gloo does not know about nodes, and NCCL does only where it detects them.

One sum takes three collectives, which depend on each other, and all ranks must start the
collectives of several sums in the same order. On a CPU a separate thread runs them one after
another while the backward pass continues; on a GPU a separate stream does, and the host does not
wait. (Callbacks of gloo's futures would not do: they run on gloo's threads, in any order.)

DDP needs annotations of `allreduce_hook` that are objects, not strings. So this module must not use
`from __future__ import annotations`.
"""

import queue
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Allreduce = Callable[[Tensor], torch.futures.Future[Tensor]]
"""Sums a tensor over all ranks, in place, and returns a future of that tensor."""


class HierarchicalAllreduce:
    """Sums tensors over all ranks: reduce within nodes, allreduce between nodes, broadcast back.

    The result has the same bits on all ranks and in every run. Every rank must create this object,
    and sum the same tensors in the same order.

    Args:
        node_size: number of ranks per node; the ranks of a node are consecutive.
        timeout: time limit of a collective; None takes PyTorch's default.

    Raises:
        ValueError: node_size does not divide the number of ranks.
    """

    def __init__(self, node_size: int, timeout: timedelta | None = None) -> None:
        world_size, rank = dist.get_world_size(), dist.get_rank()
        if node_size < 1 or world_size % node_size:
            raise ValueError(
                f"node_size: expected a divisor of the number of ranks ({world_size}), "
                f"got {node_size}"
            )
        self._leader = rank - rank % node_size
        self._leads = rank == self._leader
        self._node, _ = dist.new_subgroups(group_size=node_size, timeout=timeout)
        self._leaders = dist.new_group(list(range(0, world_size, node_size)), timeout=timeout)
        self._todo: queue.SimpleQueue[Callable[[], None] | None] | None = None
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, tensor: Tensor) -> torch.futures.Future[Tensor]:
        """Starts the sum over all ranks, in place, and returns at once.

        Args:
            tensor: contiguous and floating point; the same size and dtype on all ranks, and on a
                CPU on all of them or on a GPU on all of them.

        Returns:
            A future of the tensor. If a collective fails on a CPU, the future raises its error.
        """
        return self._on_stream(tensor) if tensor.is_cuda else self._in_thread(tensor)

    def _in_thread(self, tensor: Tensor) -> torch.futures.Future[Tensor]:
        if self._todo is None:
            self._todo = queue.SimpleQueue()
            # A daemon thread, so that it cannot keep the process alive after a rank has failed.
            threading.Thread(
                target=_run_all, args=(self._todo,), name="hierarchical_allreduce", daemon=True
            ).start()
            weakref.finalize(self, self._todo.put, None)
        done: torch.futures.Future[Tensor] = torch.futures.Future()

        def run() -> None:
            try:
                self._sum(tensor)
            except Exception as error:  # raised again in the thread that waits
                done.set_exception(error)  # type: ignore[arg-type]
            else:
                done.set_result(tensor)

        self._todo.put(run)
        return done

    def _on_stream(self, tensor: Tensor) -> torch.futures.Future[Tensor]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        done: torch.futures.Future[Tensor] = torch.futures.Future(devices=[tensor.device])
        with torch.cuda.stream(self._stream):
            self._sum(tensor)
            tensor.record_stream(self._stream)
            done.set_result(tensor)  # records an event on the stream
        return done

    def _sum(self, tensor: Tensor) -> None:
        dist.reduce(tensor, self._leader, group=self._node)
        if self._leads:
            dist.all_reduce(tensor, group=self._leaders)
        dist.broadcast(tensor, self._leader, group=self._node)


class _Averages(Protocol):
    averages_gradients: bool


class OptimizerAllreduce:
    """Sums tensors over all ranks while an optimizer takes averaged gradients; else leaves them.

    An optimizer that communicates by itself (`OneBitAdam`) takes averaged gradients at times, and
    each rank's own at others. `ddp_model.register_comm_hook(OptimizerAllreduce(optimizer),
    allreduce_hook)` gives it what its next step takes. While it takes each rank's own, nothing is
    sent, and a tensor is multiplied by the number of ranks, as if all had the same.

    Args:
        optimizer: has an attribute `averages_gradients`: whether its next step takes gradients that
            are averaged over the ranks.
    """

    def __init__(self, optimizer: _Averages) -> None:
        self._optimizer = optimizer

    def __call__(self, tensor: Tensor) -> torch.futures.Future[Tensor]:
        """Starts the sum over all ranks, in place, and returns a future of the tensor."""
        if self._optimizer.averages_gradients:
            future = dist.all_reduce(tensor, async_op=True).get_future()
            return future.then(lambda done: done.value()[0])
        own: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=[tensor.device] if tensor.is_cuda else None
        )
        own.set_result(tensor.mul_(dist.get_world_size()))
        return own


def _run_all(todo: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (work := todo.get()) is not None:
        work()
        del work  # it refers to the HierarchicalAllreduce, whose finalizer ends this loop


def allreduce_hook(state: Allreduce, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A DDP communication hook that averages buckets with the allreduce given as its state."""
    return state(bucket.buffer().div_(dist.get_world_size()))
