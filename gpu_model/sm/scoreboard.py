"""Cycles of an SM that runs blocks of one kernel: scoreboard.cpp, fed with traces of walk.py."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from gpu_model import build
from gpu_model.sm.architectures import PARTITIONS, PIPES, Architecture, cost
from gpu_model.sm.mbarriers import NAMES as MBARRIER_NAMES
from gpu_model.sm.mbarriers import MBarrierUse
from gpu_model.sm.sass import Function, Instruction
from gpu_model.sm.walk import WarpTrace

_PLAIN, _BARRIER, _COMMIT, _WAIT, _COPY, _ARRIVAL, _PRODUCT, _WAIT_PRODUCTS = range(8)
_MBARRIER = {"init": 8, "change": 9, "late": 10, "copy": 11, "wait": 12}
RECORD = np.dtype(
    [
        (name, np.int32)
        for name in (
            *("kind", "pipe", "stall", "wait_mask", "write_barrier", "read_barrier"),
            *("argument", "warps", "bytes"),
        )
    ]
    + [(name, np.float64) for name in ("busy", "latency", "read", "shared")],
    align=True,
)
_NO_BARRIER = 7


class _Machine(ctypes.Structure):
    _fields_ = (
        *((n, ctypes.c_int32) for n in ("pipes", "shared", "heavy", "fma", "none", "greedy")),
        ("mbarriers", ctypes.c_int32),
        *((n, ctypes.c_double) for n in ("queue", "barrier_latency", "launch_latency")),
    )


@dataclass(frozen=True)
class Result:
    """Cycles for one block of an SM that is busy with such blocks, and how many of these each pipe
    was busy (the mean of the partitions; `issue` counts issued instructions)."""

    cycles: float
    busy: dict[str, float]

    @property
    def bound(self) -> str:
        """The pipe that was busy most, with its share of the time; latency where that is less than
        70 %."""
        name = max(self.busy, key=lambda pipe: self.busy[pipe])
        share = self.busy[name] / self.cycles
        return f"{name if share >= 0.7 else f'latency, then {name}'} ({share:.0%})"


@cache
def _library() -> ctypes.CDLL:
    library = build.load(Path(__file__).with_name("scoreboard.cpp"))
    library.sm_simulate.restype = ctypes.c_double
    return library


def record(
    architecture: Architecture,
    instruction: Instruction,
    active: bool,
    wavefronts: int,
    use: MBarrierUse | None = None,
    mbarrier: int = 0,
) -> tuple[float, ...]:
    """One entry of RECORD. An instruction whose guard holds for no thread only takes its slot.

    Args:
        use: of an mbarrier, which has the number `mbarrier`.

    Raises:
        ValueError: there is no control code, or the instruction is not modelled.
    """
    control = instruction.control
    if control is None:
        raise ValueError(
            "control codes: expected a listing that has them (cuobjdump -sass, nvdisasm -hex), got "
            f"{instruction.text!r} without"
        )
    name, kind, argument, warps, bytes_ = instruction.name, _PLAIN, 0, 0, 0
    waits_for = control.wait_mask
    value = cost(architecture, instruction, wavefronts)
    if not active:
        return (
            *(kind, PIPES.index("none"), control.stall, control.wait_mask),
            *(_NO_BARRIER, _NO_BARRIER, 0, 0, 0, 1.0, 0.0, 0.0, 0.0),
        )
    if use is not None:
        kind = _MBARRIER["late" if use.late else use.kind]
        argument, warps, bytes_ = mbarrier, use.arrivals, use.bytes
        if use.kind == "copy":
            value = value._replace(shared=-use.bytes / 128)
    elif name == "BAR":
        kind, argument, warps = _barrier(instruction, wavefronts)
    elif name == "LDGDEPBAR":
        kind = _COMMIT
    elif name == "DEPBAR":
        found = re.search(r"LE SB([0-5]), (0x[0-9a-f]+)(, \{[0-5,]+\})?$", instruction.text)
        count = int(found[2], 16) if found else 1
        if found and found[1] == "0" and not found[3]:
            kind, argument = _WAIT, count  # of the groups of asynchronous copies
        elif count == 0:
            # The barriers that loads and others count on, as a control code names them.
            for number in re.findall("[0-5]", found[1] + (found[3] or "")):
                waits_for |= 1 << int(number)
        else:
            raise ValueError(f"wait: expected DEPBAR.LE SB0, n, got {instruction.text!r}")
    elif name == "LDGSTS":
        kind = _COPY
    elif name == "HGMMA":
        kind, argument = _PRODUCT, int("gsb0" in instruction.text)
    elif name == "WARPGROUP" and "DEPBAR" in instruction.suffixes:
        found = re.search(r"LE gsb0, (0x[0-9a-f]+)$", instruction.text)
        if not found:
            raise ValueError(f"wait: expected DEPBAR.LE gsb0, n, got {instruction.text!r}")
        kind, argument = _WAIT_PRODUCTS, int(found[1], 16)
    return (
        *(kind, PIPES.index(value.pipe), control.stall, waits_for),
        *(control.write_barrier, control.read_barrier, argument, warps, bytes_),
        *(value.busy, value.latency, value.read, value.shared),
    )


def _barrier(instruction: Instruction, known: int) -> tuple[int, int, int]:
    """Kind of record, number and warps. `known`: the number, plus 1, where a register holds it."""
    kinds = {"SYNC": _BARRIER, "RED": _BARRIER, "ARV": _ARRIVAL}
    kind = next((kinds[s] for s in instruction.opcode.split(".") if s in kinds), None)
    if kind is None:
        raise ValueError(
            f"barrier: expected BAR.SYNC, BAR.RED or BAR.ARV, got {instruction.text!r}"
        )
    numbers = [o.value for o in instruction.operands if o.kind == "immediate"]
    if known:
        numbers.insert(0, known - 1)
    if not known and instruction.operands and instruction.operands[0].kind != "immediate":
        raise ValueError(f"barrier: expected a number that is known, got {instruction.text!r}")
    return kind, numbers[0] if numbers else 0, numbers[1] // 32 if len(numbers) > 1 else 0


def simulate(
    architecture: Architecture,
    function: Function,
    blocks: Sequence[Sequence[WarpTrace]],
    repeats: int = 1,
    starts: Sequence[float] | None = None,
    greedy: bool = False,
) -> Result:
    """Runs blocks side by side on one SM; the totals, not those per block.

    Args:
        blocks: of each, the traces of its warps. Warp w is on partition w % 4.
        repeats: how often each block runs, one after the other.
        starts: in which cycle each begins; default 0.
        greedy: whether a partition stays with a warp as long as it can issue; else it goes round.

    Raises:
        ValueError: warps wait for each other for ever.
    """
    keys: dict[tuple[int, int], int] = {}
    mbarriers: dict[int, int] = {}  # numbers by address
    table: list[tuple[float, ...]] = []
    numbers: dict[int, np.ndarray] = {}  # of a trace, by its identity
    warps = [warp for block in blocks for warp in block]
    for warp in warps:
        if id(warp) in numbers:
            continue
        packed = warp.code.astype(np.int64) << 32 | warp.wavefronts << 1 | warp.active
        unique, inverse = np.unique(packed, return_inverse=True)
        places = [(id(warp.uses), key) for key in unique.tolist()]
        for place in places:
            if place in keys:
                continue
            keys[place] = len(table)
            instruction, waves = function.instructions[place[1] >> 32], (place[1] & 0xFFFFFFFF) >> 1
            use, mbarrier = None, 0
            if instruction.name in MBARRIER_NAMES and waves:
                use, waves = warp.uses[waves - 1], 0
                mbarrier = mbarriers.setdefault(use.address, len(mbarriers))
            table.append(
                record(architecture, instruction, bool(place[1] & 1), waves, use, mbarrier)
            )
        numbers[id(warp)] = np.array([keys[place] for place in places], np.int32)[inverse]
    traces = [numbers[id(warp)] for warp in warps]
    lengths = np.array([len(t) for t in traces], np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    owner = np.repeat(np.arange(len(blocks)), [len(b) for b in blocks]).astype(np.int32)
    # Blocks begin on different partitions only if they have no multiple of four warps.
    partition = (np.arange(len(traces)) % PARTITIONS).astype(np.int32)
    first = np.array(starts if starts is not None else [0.0] * len(blocks), np.float64)
    busy = np.zeros(len(PIPES) + 1)
    machine = _Machine(
        *(len(PIPES), *(PIPES.index(pipe) for pipe in ("shared", "heavy", "fma", "none")), greedy),
        len(mbarriers),
        *(architecture.queue, architecture.barrier_latency, architecture.launch_latency),
    )
    arrays = (np.array(table, RECORD), np.concatenate(traces).astype(np.int32))
    pointer = [ctypes.c_void_p(a.ctypes.data) for a in arrays]
    cycles = _library().sm_simulate(
        ctypes.byref(machine),
        *(*pointer, len(traces), ctypes.c_void_p(offsets.ctypes.data)),
        *(ctypes.c_void_p(a.ctypes.data) for a in (lengths, owner, partition)),
        *(len(blocks), ctypes.c_void_p(first.ctypes.data), repeats),
        ctypes.c_void_p(busy.ctypes.data),
    )
    if cycles < 0:
        raise ValueError(f"{function.name}: its warps wait for each other for ever")
    shares = {
        pipe: float(busy[i]) / (1 if pipe == "shared" else PARTITIONS)
        for i, pipe in enumerate(PIPES)
        if pipe != "none"
    }
    return Result(cycles, shares | {"issue": float(busy[-1]) / PARTITIONS})


def steady(
    architecture: Architecture,
    function: Function,
    block: Sequence[WarpTrace],
    slots: int,
    repeats: tuple[int, int] = (2, 5),
) -> Result:
    """One block's share of an SM's time, with `slots` such blocks on it all the time.

    The blocks begin apart, and what is counted lies between `repeats` passes of each; the mean of
    both ways to choose a warp.
    """
    apart = simulate(architecture, function, [block]).cycles / slots
    starts = [slot * apart for slot in range(slots)]
    short, long = repeats
    sums: dict[str, float] = dict.fromkeys([*PIPES, "issue", "cycles"], 0.0)
    for greedy in (False, True):
        runs = [
            simulate(architecture, function, [block] * slots, n, starts, greedy)
            for n in (short, long)
        ]
        share = 1 / (2 * slots * (long - short))
        sums["cycles"] += (runs[1].cycles - runs[0].cycles) * share
        for pipe, value in runs[1].busy.items():
            sums[pipe] += (value - runs[0].busy[pipe]) * share
    sums.pop("none")
    return Result(sums.pop("cycles"), sums)
