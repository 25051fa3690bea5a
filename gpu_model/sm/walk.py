"""Which instructions the warps of one block execute, in order.

The block's threads run through the machine code together, and what addresses, counters and
conditions are made of is computed (semantics.py); values of matrices are not. So the trace of a
block has the loops' true trip counts, partly filled tiles and predicated instructions, and no one
has to say which path a kernel takes. Threads that have gone different ways run in the order of
their addresses until they meet again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_model.sm import mbarriers, semantics
from gpu_model.sm.mbarriers import MBarrierUse
from gpu_model.sm.sass import SIZE, Function, Instruction
from gpu_model.sm.state import Memory, State, address_parts

# Where kernel parameters begin in constant bank 0, by the compute capability's major number.
PARAMETERS_AT = {7: 0x160, 8: 0x160, 9: 0x210, 10: 0x380, 12: 0x380}
MOST_STEPS = 5_000_000
_TRAPS = {"BPT", "CALL"}


@dataclass(frozen=True)
class WarpTrace:
    """What one warp executes: numbers of instructions, whether any thread's guard holds, and how
    many times shared memory is accessed for it (0: as often as its size needs). In the place of the
    latter barriers have their number plus 1 where a register holds it, and mbarriers' instructions
    that of an entry of `uses`."""

    code: NDArray[np.int32]
    active: NDArray[np.bool_]
    wavefronts: NDArray[np.int32]
    uses: Sequence[MBarrierUse] = ()


def wavefronts(addresses: NDArray[np.uint64], width: int) -> int:
    """Accesses to shared memory's 32 banks for one warp: threads whose words of 4 bytes lie in one
    bank, and differ, are served one after the other. Threads of 8 bytes go by halves of a warp,
    those of 16, and the rows of LDSM's matrices, by eight."""
    together = max(1, min(32, 128 // width))
    total = 0
    for first in range(0, len(addresses), together):
        words = addresses[first : first + together, None] // np.uint64(4) + np.arange(
            width // 4 or 1, dtype=np.uint64
        )
        unique = np.unique(words)
        total += int(np.bincount((unique % np.uint64(32)).astype(np.int64)).max())
    return total


class Walk:
    """One block on its way through a kernel."""

    def __init__(
        self,
        function: Function,
        threads: int,
        grid: Sequence[int],
        block: Sequence[int],
        parameters: bytes,
        memory: Memory,
        trips: Mapping[int, int] | None = None,
    ):
        if threads % 32 or not 0 < threads <= 1024:
            raise ValueError(f"threads: expected a multiple of 32 up to 1024, got {threads}")
        major = int(re.match(r"sm_(\d+)\d", function.arch)[1])
        start = PARAMETERS_AT[major]
        bank = np.zeros((start + len(parameters) + 3) // 4 * 4, np.uint8)
        bank[start : start + len(parameters)] = np.frombuffer(parameters, np.uint8)
        words = bank.view(np.uint32)
        words[:3], words[3:6] = (threads, 1, 1), grid
        self.function, self.memory, self.trips = function, memory, trips or {}
        self.trips_left: dict[int, int] = {}
        self.state = State(threads, block, words)
        self.threads, self.warps = threads, threads // 32
        self.all_warps = (1 << self.warps) - 1
        self.handlers = [semantics.find(ins) for ins in function.instructions]
        self.local: dict[tuple[int, tuple[Any, ...]], Any] = {}
        self.conflicts: dict[tuple[int, bytes], int] = {}
        self.steps: list[tuple[int, int, int, int]] = []
        self.uses: dict[MBarrierUse, int] = {}
        self.guesses: set[int] = set()  # addresses of branches on unknown data

    def run(self) -> list[WarpTrace]:
        """The trace of each warp.

        Raises:
            ValueError: an assertion fails, a loop's end is not known and not in `trips`, or the
                block does not end.
        """
        groups: dict[int, Any] = {0: None}
        while groups:
            if len(self.steps) > MOST_STEPS:
                raise ValueError(f"{self.function.name}: no end after {MOST_STEPS} instructions")
            number = min(groups)
            mask = groups.pop(number)
            for after, threads in self.step(number, mask):
                if after in groups and groups[after] is not None:
                    merged = groups[after] | threads
                    threads = None if merged.all() else merged
                groups[after] = threads
        return self._traces()

    def step(self, number: int, mask: Any) -> list[tuple[int, Any]]:
        """Executes one instruction for the threads of `mask`; where they go on."""
        ins = self.function.instructions[number]
        everyone = self.state.true if mask is None else mask
        self.state.active = mask
        guard = self.state.true if ins.guard is None else self.state.bits(ins.guard)
        if ins.name in ("BRA", "JMP"):
            return self._branch(number, ins, everyone, guard)
        held = everyone if guard is None else everyone & guard
        if guard is None and ins.name in ("EXIT", "RET", *_TRAPS):
            self.guesses.add(ins.address)
            held = ~self.state.true
        issued = self._warp_bits(mask)
        if not held.any():
            self.steps.append((number, issued, 0, 0))
            return [(number + 1, mask)]
        full = mask if ins.guard is None else None if held.all() else held
        if ins.name == "BAR":
            self._barrier(number, ins, issued, self._warp_bits(full))
        elif ins.name in mbarriers.NAMES:
            self._mbarrier(number, ins, issued, held)
        else:
            self.steps.append((number, issued, self._warp_bits(full), self._waves(number, ins)))
        left = [(number + 1, everyone & ~held)] if (everyone & ~held).any() else []
        if ins.name == "EXIT":
            return left
        if ins.name in ("CALL", "RET"):
            return [(self._call(ins), self._shared(held)), *left]
        if ins.name == "BPT":
            raise ValueError(f"{self.function.name}: a trap at {ins.address:#x} is reached")
        if ins.result_count or ins.name in ("STL", "R2P"):
            self._execute(number, ins, full, guard is not None)
        return [(number + 1, mask)]

    def _mbarrier(self, number: int, ins: Instruction, issued: int, held: Any) -> None:
        idle = issued & ~self._warp_bits(held)
        if idle:
            self.steps.append((number, idle, 0, 0))
        for warp, use in mbarriers.uses(self.state, ins, held):
            place = 0 if use is None else self.uses.setdefault(use, len(self.uses)) + 1
            self.steps.append((number, 1 << warp, 1 << warp, place))

    def _barrier(self, number: int, ins: Instruction, issued: int, active: int) -> None:
        """A step for the warps of each barrier where a register has its number."""
        first = ins.operands[0] if ins.operands else None
        if first is None or first.kind not in ("register", "uniform"):
            self.steps.append((number, issued, active, 0))
            return
        value = self.state.words(first)
        if value is None:
            raise ValueError(f"{self.function.name}: the barrier at {ins.address:#x} is not known")
        of_warp = value.reshape(-1, 32)[:, 0]
        for which in np.unique(of_warp):
            warps = sum(1 << i for i in np.flatnonzero(of_warp == which).tolist())
            if issued & warps:
                self.steps.append((number, issued & warps, active & warps, int(which) + 1))

    def _execute(self, number: int, ins: Instruction, mask: Any, known: bool) -> None:
        self.state.active = mask
        values: list[Any]
        if ins.name in ("LDG", "LDL", "STL"):
            values = self._load(ins, mask)
        elif self.handlers[number] is None or not known:
            values = [None] * ins.result_count
        else:
            values = self.handlers[number](self.state, ins)
        width = ins.result_width
        for operand, value in zip(ins.results, values, strict=True):
            wide_result = operand.kind in ("register", "uniform")
            self.state.write(operand, value, width if wide_result else 1, mask)
        if ins.name == "R2P":
            self._unpack(ins)

    def _load(self, ins: Instruction, mask: Any) -> list[Any]:
        operand = next(o for o in ins.operands if o.kind == "address")
        if ins.name != "LDG":
            width = ins.result_width if ins.name == "LDL" else ins.source_width(1)
            base = address_parts(operand.text)
            places = [(operand.value + 4 * i, base) for i in range(width)]
            if ins.name == "LDL":
                return [tuple(self.local.get(place) for place in places)]
            for i, place in enumerate(places):
                number = ins.operands[1].number
                new = self.state.get("register", None if number is None else number + i)
                if mask is not None and new is not None:
                    old = self.local.get(place)
                    new = None if old is None else np.where(mask, new, old)
                self.local[place] = new
            return []
        address = self.state.address(operand, True)
        narrow = ins.suffixes & {"U8", "S8", "U16", "S16"}
        if address is None or narrow:
            return [None] * ins.result_count
        chosen = address if mask is None else np.where(mask, address, address[mask][0])
        found = self.memory.read(chosen, ins.result_width)
        others = [None] * (ins.result_count - 1)
        return [tuple(found) if len(found) > 1 else found[0], *others]

    def _unpack(self, ins: Instruction) -> None:
        value, chosen = self.state.words(ins.operands[1]), ins.operands[2].value
        for i in range(7):
            if chosen >> i & 1:
                bit = None if value is None else (value >> np.uint32(i) & 1).astype(bool)
                self.state.files["predicate"][i] = bit

    def _branch(
        self, number: int, ins: Instruction, mask: Any, guard: Any
    ) -> list[tuple[int, Any]]:
        bits = self._warp_bits(mask)
        self.steps.append((number, bits, bits, 0))
        if "DIV" in ins.suffixes:  # taken where a warp is not whole: never with whole warps
            return [(number + 1, self._shared(mask))]
        if ins.target is None:
            raise ValueError(f"{self.function.name}: {ins.text} at {ins.address:#x} goes anywhere")
        target = self.function.index(ins.target)
        if "ANY" in ins.suffixes and guard is not None:  # of the warp's threads
            guard = np.repeat((guard & mask).reshape(-1, 32).any(1), 32)
        condition = ins.condition
        other = self.state.true if condition is None else self.state.bits(condition)
        taken = None if guard is None or other is None else guard & other
        if taken is None:
            known = [c for c in (guard, other) if c is not None]
            if known and not (mask & known[0]).any():
                taken = ~self.state.true
            else:
                taken = self.state.true if self._guess(number, target) else ~self.state.true
        goes, stays = mask & taken, mask & ~taken
        after = [(target, goes), (number + 1, stays)]
        return [(to, self._shared(threads)) for to, threads in after if threads.any()]

    def _guess(self, number: int, target: int) -> bool:
        """Whether a branch on unknown data is taken: not, unless it jumps over a call (the slow
        path of a division, an assertion); back to a loop's start as often as `trips` says."""
        if target <= number:
            address = target * SIZE
            if address not in self.trips:
                raise ValueError(
                    f"trips: expected a count for the loop at {address:#x} of {self.function.name},"
                    " whose end depends on data"
                )
            left = self.trips_left.pop(address, self.trips[address]) - 1
            if left > 0:
                self.trips_left[address] = left
            return left > 0
        self.guesses.add(number * SIZE)
        between = self.function.instructions[number + 1 : target]
        return len(between) < 64 and any(ins.name in _TRAPS for ins in between)

    def _call(self, ins: Instruction) -> int:
        if ins.name == "CALL" and ins.target is not None:
            return self.function.index(ins.target)
        value = self.state.words(ins.operands[0]) if ins.name == "RET" else None
        if value is None:
            raise ValueError(
                f"{self.function.name}: {ins.text} at {ins.address:#x} is reached: an assertion "
                "that these parameters do not hold"
            )
        return self.function.index(int(value[0]))

    def _shared(self, mask: Any) -> Any:
        return None if mask.all() else mask

    def _warp_bits(self, mask: Any) -> int:
        if mask is None:
            return self.all_warps
        return sum(1 << i for i, on in enumerate(mask.reshape(-1, 32).any(1).tolist()) if on)

    def _waves(self, number: int, ins: Instruction) -> int:
        """Of the first warp; 0 if the address is not known."""
        if ins.name not in ("LDS", "STS", "LDSM", "LDGSTS"):
            return 0
        operand = next(o for o in ins.operands if o.kind == "address")
        address = self.state.address(operand, False)
        if address is None:
            return 0
        key = (number, (address[:32] % np.uint64(128)).astype(np.uint8).tobytes())
        # The pattern of banks, but not which words are the same, follows from this key; they are
        # the same threads' words at every pass of one instruction.
        if key not in self.conflicts:
            if ins.name == "LDSM":
                count = wavefronts(address[: 8 * ins.result_width], 16)
            else:
                width = 16 if "128" in ins.suffixes else 8 if "64" in ins.suffixes else 4
                count = wavefronts(address[:32], width)
            self.conflicts[key] = count
        return self.conflicts[key]

    def _traces(self) -> list[WarpTrace]:
        steps = np.array(self.steps, np.int64).reshape(-1, 4)
        traces, uses = [], tuple(self.uses)
        for warp in range(self.warps):
            mine = steps[(steps[:, 1] >> warp & 1).astype(bool)]
            traces.append(
                WarpTrace(
                    mine[:, 0].astype(np.int32),
                    (mine[:, 2] >> warp & 1).astype(bool),
                    mine[:, 3].astype(np.int32),
                    uses,
                )
            )
        return traces
