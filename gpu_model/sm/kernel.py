"""How long launches of whole kernels take: blocks of each kind by the model of an SM, a list of
them on all SMs, and the time that their bytes need.

What differs between blocks of a launch is told by the caller's keys; one block of each kind is
walked through the machine code (walk.py) and timed beside others of its kind (scoreboard.py).
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from gpu_model.sm.architectures import Architecture
from gpu_model.sm.occupancy import Occupancy, occupancy
from gpu_model.sm.sass import Function
from gpu_model.sm.scoreboard import Result, steady
from gpu_model.sm.state import Memory
from gpu_model.sm.walk import PARAMETERS_AT, Walk, WarpTrace

_USAGE = re.compile(
    r"^\s*Function (\S+):\s*\n\s*REG:(\d+) .*?SHARED:(\d+) .*?CONSTANT\[0\]:(\d+)", re.M
)


@dataclass(frozen=True)
class Kernel:
    """A kernel's machine code and what a block of it needs; sizes in bytes."""

    function: Function
    registers: int
    shared: int  # static
    parameters: int


def kernels(functions: dict[str, Function], usage: str) -> dict[str, Kernel]:
    """Functions with what `cuobjdump -res-usage` says about them, by mangled name.

    Raises:
        ValueError: one is not in that listing.
    """
    found = {name: tuple(map(int, rest)) for name, *rest in _USAGE.findall(usage)}
    result = {}
    for name, function in functions.items():
        if name not in found:
            raise ValueError(f"usage: expected a line for {name}, there is none")
        registers, shared, constants = found[name]
        major = int(re.match(r"sm_(\d+)\d", function.arch)[1])
        # From Hopper on the listing counts what the system takes of each block's shared memory.
        shared -= 1024 if major >= 9 else 0
        result[name] = Kernel(function, registers, shared, constants - PARAMETERS_AT[major])
    return result


@dataclass(frozen=True)
class Launch:
    """One launch.

    `kinds`: of each block, in launch order (x fastest), what its time depends on. `trips`: of loops
    whose end depends on data, by the address that they begin at.
    """

    kernel: Kernel
    grid: tuple[int, int, int]
    threads: int
    shared: int  # dynamic, bytes
    parameters: bytes
    kinds: Sequence[Hashable]
    memory: Memory = field(default_factory=Memory)
    trips: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        x, y, z = self.grid
        if len(self.kinds) != x * y * z:
            raise ValueError(f"kinds: expected one per block ({x * y * z}), got {len(self.kinds)}")
        if len(self.parameters) != self.kernel.parameters:
            raise ValueError(
                f"parameters: expected {self.kernel.parameters} bytes, as {self.name} takes, got "
                f"{len(self.parameters)}"
            )

    @property
    def name(self) -> str:
        return self.kernel.function.name

    @cached_property
    def examples(self) -> dict[Hashable, int]:
        """A block of each kind: the middle one."""
        places: dict[Hashable, list[int]] = {}
        for i, kind in enumerate(self.kinds):
            places.setdefault(kind, []).append(i)
        return {kind: at[len(at) // 2] for kind, at in places.items()}

    def walk(self, block: int) -> list[WarpTrace]:
        """What the warps of a block, by its number in launch order, execute."""
        x, y, _ = self.grid
        place = (block % x, block // x % y, block // (x * y))
        function, data = self.kernel.function, (self.parameters, self.memory, self.trips)
        return Walk(function, self.threads, self.grid, place, *data).run()


@dataclass(frozen=True)
class Stage:
    """Launches that run side by side, and the bytes that they read from and write to memory."""

    name: str
    launches: Sequence[Launch]
    bytes: float


@dataclass(frozen=True)
class Prediction:
    """Of a stage. `cycles`: until its last block ends, if memory were no limit. `bound`: of the
    kind of block that takes most of the time."""

    name: str
    seconds: float
    cycles: float
    dram_seconds: float
    bound: str


class Model:
    """Times of launches on one architecture; keeps those of blocks that it has seen."""

    def __init__(self, architecture: Architecture):
        self.architecture = architecture
        self._blocks: dict[tuple[str, Hashable, int], Result] = {}

    def at(self, clock: float, dram: float, kernel_seconds: float) -> Model:
        """The same at other rates. Both keep the cycles of blocks that either has seen."""
        rates = {"clock": clock, "dram": dram, "kernel_seconds": kernel_seconds}
        other = Model(replace(self.architecture, **rates))
        other._blocks = self._blocks
        return other

    def occupancy(self, launch: Launch) -> Occupancy:
        shared = launch.kernel.shared + launch.shared
        return occupancy(self.architecture, launch.threads, launch.kernel.registers, shared)

    def block(self, launch: Launch, kind: Hashable) -> Result:
        """A block's share of an SM's time, beside others of its kind."""
        slots = self.occupancy(launch).blocks
        key = (launch.name, kind, slots)
        if key not in self._blocks:
            trace = launch.walk(launch.examples[kind])
            # Enough blocks that the first ones' start no longer matters; long ones need fewer.
            repeats = (1, 3) if max(len(warp.code) for warp in trace) > 12_000 else (2, 5)
            self._blocks[key] = steady(
                self.architecture, launch.kernel.function, trace, slots, repeats
            )
        return self._blocks[key]

    def stage(self, stage: Stage) -> Prediction:
        """Blocks start in order, each on the SM that has most room; what of the time for bytes is
        not hidden is the difference between the two times' 4-norm and the longer one."""
        a = self.architecture
        jobs, shares = [], Counter()
        bounds: dict[tuple[str, Hashable], str] = {}
        for launch in stage.launches:
            slots = self.occupancy(launch).blocks
            for kind in launch.kinds:
                result = self.block(launch, kind)
                jobs.append((result.cycles * slots, 1.0 / slots))
                shares[launch.name, kind] += result.cycles
                bounds[launch.name, kind] = result.bound
        cycles = makespan(jobs, a.sms)
        dram = stage.bytes / a.dram
        busy = ((cycles / a.clock) ** 4 + dram**4) ** 0.25
        overhead = a.kernel_seconds + (a.fork_seconds if len(stage.launches) > 1 else 0.0)
        bound = bounds[shares.most_common(1)[0][0]] if shares else "memory"
        if dram > cycles / a.clock:
            bound = "memory"
        return Prediction(stage.name, busy + overhead, cycles, dram, bound)


def makespan(jobs: Sequence[tuple[float, float]], sms: int) -> float:
    """When the last of these blocks ends, each (cycles, share of an SM), started in order."""
    room = [(-1.0, sm) for sm in range(sms)]  # a heap: the SM with most room first
    free = [1.0] * sms
    running: list[tuple[float, int, float]] = []
    now = 0.0
    for cycles, share in jobs:
        while True:
            while -room[0][0] != free[room[0][1]]:  # has changed since
                heapq.heappop(room)
            if -room[0][0] >= share - 1e-9:
                break
            now, sm, back = heapq.heappop(running)
            free[sm] += back
            heapq.heappush(room, (-free[sm], sm))
        sm = heapq.heappop(room)[1]
        free[sm] -= share
        heapq.heappush(room, (-free[sm], sm))
        heapq.heappush(running, (now + cycles, sm, share))
    return max((end for end, _, _ in running), default=0.0)
