"""Sums over ranks in two hops: within each node first, then between nodes.

What crosses the network is one tensor a node, however many ranks a node has, and only as many ranks
talk across it as there are nodes. A flat ring that a library lays through all ranks does as well
where it follows the nodes; gloo's does not know of nodes, and NCCL's only where it finds out.

The three collectives of one sum depend on each other, and all ranks must start those of several
sums in the same order. On a CPU a thread of its own runs them one after another, while the backward
pass goes on; on a GPU a stream of its own does, and the host does not wait. (Started from the
callbacks of gloo's futures, which run on threads of gloo's, they would mix.)

DDP checks the annotations of `allreduce_hook`, which must be objects: this module does without
`from __future__ import annotations`.
"""

import queue
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Allreduce", "HierarchicalAllreduce", "allreduce_hook"]

Allreduce = Callable[[Tensor], torch.futures.Future[Tensor]]
"""Sums a tensor over all ranks, in place; the future is of that tensor."""


class HierarchicalAllreduce:
    """Sums tensors: to the first rank of each node, among these, and back to all of the node.

    The result is the same bits on all ranks, and the same in every run. Every rank must make the
    object, and sum the same tensors in the same order.

    Args:
        node_size: ranks of a node, which are consecutive; divides the number of all ranks.
        timeout: of the groups; None: PyTorch's.

    Raises:
        ValueError: it does not.
    """

    def __init__(self, node_size: int, timeout: timedelta | None = None) -> None:
        world_size, rank = dist.get_world_size(), dist.get_rank()
        if node_size < 1 or world_size % node_size:
            raise ValueError(
                f"node_size must divide the number of ranks ({world_size}), got {node_size}"
            )
        self._leader = rank - rank % node_size
        self._leads = rank == self._leader
        self._node, _ = dist.new_subgroups(group_size=node_size, timeout=timeout)
        self._leaders = dist.new_group(list(range(0, world_size, node_size)), timeout=timeout)
        self._todo: queue.SimpleQueue[Callable[[], None] | None] | None = None
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, tensor: Tensor) -> torch.futures.Future[Tensor]:
        """Sums over all ranks, in place; returns at once.

        Args:
            tensor: contiguous, float; the same size and dtype on all ranks, and all on a CPU or all
                on GPUs.

        Returns:
            A future of the tensor; of an error, where a collective has failed on a CPU.
        """
        return self._on_stream(tensor) if tensor.is_cuda else self._in_thread(tensor)

    def _in_thread(self, tensor: Tensor) -> torch.futures.Future[Tensor]:
        if self._todo is None:
            self._todo = queue.SimpleQueue()
            # A daemon: where a rank fails, nothing may keep the process from ending.
            threading.Thread(
                target=_run_all, args=(self._todo,), name="hierarchical_allreduce", daemon=True
            ).start()
            weakref.finalize(self, self._todo.put, None)
        done: torch.futures.Future[Tensor] = torch.futures.Future()

        def run() -> None:
            try:
                self._sum(tensor)
            except Exception as error:  # raised again by whoever waits
                done.set_exception(error)
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
            done.set_result(tensor)  # notes where the stream stands
        return done

    def _sum(self, tensor: Tensor) -> None:
        dist.reduce(tensor, self._leader, group=self._node)
        if self._leads:
            dist.all_reduce(tensor, group=self._leaders)
        dist.broadcast(tensor, self._leader, group=self._node)


def _run_all(todo: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (work := todo.get()) is not None:
        work()
        del work  # which refers to the object whose end ends this


def allreduce_hook(state: Allreduce, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A DDP communication hook that averages by `state`; register the two together."""
    return state(bucket.buffer().div_(dist.get_world_size()))
