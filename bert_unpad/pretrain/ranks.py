"""The processes of a run: joining them, their devices and threads, and sums over all of them.

A run of one process never touches torch.distributed. With more, gloo carries CPU tensors and NCCL
carries CUDA tensors; a separate gloo group serves checkpoints, whose background thread must not
interleave its collectives with those of training.
"""

import gc
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from bert_unpad.pretrain.config import ConfigError, PretrainConfig
from bert_unpad.pretrain.cores import bound_to_cores
from bert_unpad.pretrain.rank_watch import RankWatch, error_chain, open_store, within

T = TypeVar("T")
_MAX_THREADS = 4096  # of one process
_END_SECONDS = 5.0  # for the sums of a rank that fails


@dataclass(frozen=True)
class Ranks:
    """This process among all processes of the run."""

    rank: int
    world_size: int
    device: torch.device
    checkpoint_group: dist.ProcessGroup | None
    """gloo; None in a run of one process. Another thread may save a checkpoint by it while a run
    trains; what ranks do together then goes by the default group."""
    node_size: int = 1
    """Processes of the run on this machine."""
    timeout: timedelta = timedelta(seconds=PretrainConfig.rank_timeout)
    """Time limit of the collectives of all groups."""
    watch: RankWatch | None = None
    """What the ranks know of each other; None in a run of one process."""
    local_rank: int = 0
    """This process among those of this machine."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which alone writes files and talks to the user."""
        return self.rank == 0

    @property
    def is_first_of_node(self) -> bool:
        """Whether this is the first of the ranks of its machine."""
        return self.local_rank == 0

    def at_step(self, step: int) -> None:
        """Lets the other ranks know that this one begins an update; costs nothing."""
        if self.watch is not None:
            self.watch.at(step)

    def meet(self) -> None:
        """Waits for all ranks however long they take, see `RankWatch.meet`."""
        if self.watch is not None:
            self.watch.meet()

    def note(self, error: BaseException) -> None:
        """Tells the other ranks why this one ends, see `RankWatch.note`."""
        if self.watch is not None:
            self.watch.note(error)

    def on_first(self, action: Callable[[], T]) -> T:
        """Calls `action` on rank 0 alone; its result, a small picklable object, on all ranks.

        Raises:
            ConfigError: on all ranks, if `action` raises it.
        """
        result, failure = None, None
        if self.is_first:
            try:
                result = action()
            except ConfigError as error:
                failure = error
        # The exception itself would not pickle.
        result, reason = self.from_first((result, failure and (failure.key, str(failure))))
        if reason is not None:
            key, message = reason
            raise ConfigError(key, message.removeprefix(f"{key}: ")) from failure
        return result

    def barrier(self) -> None:
        """Waits for all ranks, on the host."""
        if self.world_size > 1:
            dist.barrier(group=self.checkpoint_group)

    def sum(self, tensor: Tensor) -> Tensor:
        """Adds up a device tensor over all ranks, in place, and returns it."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: float) -> list[float]:
        """A host number of each rank, by rank, on all of them; waits."""
        values = torch.zeros(self.world_size, dtype=torch.float64, device=self.device)
        values[self.rank] = value
        return self.sum(values).tolist()

    def from_first(self, value: Any) -> Any:
        """Rank 0's value of a small picklable object, on every rank."""
        if self.world_size == 1:
            return value
        holder = [value]
        dist.broadcast_object_list(holder, src=0, group=self.checkpoint_group)
        return holder[0]


class HostSums:
    """A few host numbers, added up over all ranks while the device is busy with something else.

    The sum is started by the constructor. `on_device` makes the current CUDA stream wait for
    it without waiting on the host (gloo has only a wait on the host); `on_host` waits for it.
    """

    def __init__(self, ranks: Ranks, values: Mapping[str, float]) -> None:
        self.names = tuple(values)
        tensor = torch.tensor([float(value) for value in values.values()], dtype=torch.float64)
        self._cuda = ranks.device.type == "cuda"
        if self._cuda:
            tensor = tensor.pin_memory().to(ranks.device, non_blocking=True)
        self._tensor = self._copy = tensor
        self._work = dist.all_reduce(tensor, async_op=True) if ranks.world_size > 1 else None
        self._copied: torch.cuda.Event | None = None

    def on_device(self) -> Tensor:
        """The sums, float64 [len(values)], in the order given."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._cuda and self._copied is None:
            self._copy = torch.empty(len(self.names), dtype=torch.float64, pin_memory=True)
            self._copy.copy_(self._tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        return self._tensor

    def on_host(self) -> dict[str, float]:
        """The sums by name. Waits until the device has reached the point of `on_device`."""
        self.on_device()
        if self._copied is not None:
            self._copied.synchronize()
        return dict(zip(self.names, self._copy.tolist(), strict=True))


@contextmanager
def join_ranks(config: PretrainConfig) -> Iterator[Ranks]:
    """Joins the processes that torchrun (or the like) has started; leaves them at the end.

    Reads RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, and MASTER_ADDR and MASTER_PORT with
    more than one process; without them this process is alone. Where a launcher does not set
    LOCAL_RANK or LOCAL_WORLD_SIZE, ranks whose hosts have the same name are on one machine.

    Raises:
        ConfigError: device is cuda and this process has no GPU, or a variable is missing.
        RankError: ranks have not joined within `rank_timeout`, or one does not come along in what
            is done with the result.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    with ExitStack() as at_end:
        if world_size == 1:
            place, node_size = _place(0, [""])
            device = at_end.enter_context(_device_and_cores(config, place, node_size))
            yield Ranks(rank, world_size, device, None, node_size)
            return
        store = open_store(rank, config.rank_timeout)
        watch = RankWatch(store, rank, world_size, config.rank_timeout)
        timeout = timedelta(seconds=config.rank_timeout)
        try:
            with watch.explained():
                place, node_size = _place(rank, watch.hosts)
                device = at_end.enter_context(_device_and_cores(config, place, node_size))
                dist.init_process_group(
                    "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                    store=dist.PrefixStore("groups", store),
                    rank=rank,
                    world_size=world_size,
                    timeout=timeout,
                )
                group = dist.new_group(backend="gloo", timeout=timeout)
                yield Ranks(rank, world_size, device, group, node_size, timeout, watch, place)
        except BaseException as error:
            _end_groups(error)
            raise
        if dist.is_initialized():
            dist.destroy_process_group()


def _end_groups(error: BaseException) -> None:
    """Ends all groups where this rank fails; sums that wait for other ranks hold it up for seconds.

    First it frees what the failed functions hold, DDP's reducers among it. Were a reducer the last
    to hold a group, the group would wait for its threads with Python's lock, for which a thread may
    wait to free the sum that it has just made: the process would never end.
    """
    for at in error_chain(error):
        traceback.clear_frames(at.__traceback__)
    gc.collect()
    if dist.is_initialized():
        within(_END_SECONDS, dist.destroy_process_group)


def _place(rank: int, hosts: Sequence[str]) -> tuple[int, int]:
    """This process among those of its machine, and how many these are.

    Args:
        rank: this one.
        hosts: the name of each rank's host.
    """
    here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    local_rank = os.environ.get("LOCAL_RANK", here.index(rank))
    return int(local_rank), int(os.environ.get("LOCAL_WORLD_SIZE", len(here)))


@contextmanager
def _device_and_cores(
    config: PretrainConfig, local_rank: int, node_size: int
) -> Iterator[torch.device]:
    """This process's device; its share of the machine's cores is given back at the end."""
    device = _device(config, local_rank)
    with ExitStack() as at_end:
        sharing = node_size
        if config.bind_cores:
            at_end.enter_context(bound_to_cores(local_rank, node_size))
            sharing = 1
        torch.set_num_threads(threads_per_process(sharing))
        yield device


def _device(config: PretrainConfig, local_rank: int) -> torch.device:
    kind = config.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            "device",
            f"expected a GPU for process {local_rank} of this machine, got "
            f"{torch.cuda.device_count()} GPUs",
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def threads_per_process(local_world_size: int) -> int:
    """CPU threads of each process on this machine.

    OMP_NUM_THREADS if that is set, otherwise an equal share of the cores.

    Raises:
        ConfigError: OMP_NUM_THREADS is not a number of threads.
    """
    given = os.environ.get("OMP_NUM_THREADS", "")
    # torchrun sets OMP_NUM_THREADS=1 where the user sets nothing, which would idle most cores.
    by_torchrun = given == "1" and "TORCHELASTIC_RUN_ID" in os.environ
    if given and not by_torchrun:
        first = given.partition(",")[0].strip()  # the others are those of nested regions
        if not (first.isdecimal() and 1 <= int(first) <= _MAX_THREADS):
            raise ConfigError(
                "OMP_NUM_THREADS", f"expected an integer of 1 to {_MAX_THREADS}, got {given!r}"
            )
        return int(first)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // local_world_size)
