"""What an instruction does to which mbarrier, as ptxas writes what PTX has of them:

SYNCS.EXCH.64 URZ, [a], UR4                  init; UR4 is 2 * (2**20 - count)
SYNCS.ARRIVE.TRANS64.A1T0 RZ, [a], RZ        an arrival of each thread
SYNCS.ARRIVE.TRANS64.ART0 RZ, [a], R4        R4 arrivals
SYNCS.ARRIVE.TRANS64 RZ, [a], R4             an arrival, and R4 more bytes are expected
SYNCS.ARRIVE.TRANS64.RED.A0TR RZ, [a], R4    only the bytes; .A0TX: complete, .A0T1: one
ARRIVES.LDGSTSBAR.64.ARVCNT [a]              an arrival when the thread's copies have landed,
                                             after .A0T1 one byte: .TRANSCNT
SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [a], R4   waits for the phase of parity R4 >> 31
UBLKCP.S.G [UR4], [UR6], UR8                 a bulk copy of 16 * UR8 bytes, completed at UR5
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpu_model.sm.sass import Instruction
from gpu_model.sm.state import State

NAMES = frozenset({"SYNCS", "ARRIVES", "UBLKCP"})


class MBarrierUse(NamedTuple):
    """One warp's. `kind`: init, change, copy or wait. `arrivals`: of init those that a phase
    expects, of wait the parity. `bytes`: that are expected, less those that have come. `late`: when
    the warp's asynchronous copies have landed."""

    kind: str
    address: int
    arrivals: int
    bytes: int
    late: bool = False


def _use(ins: Instruction, address: int, value: int, threads: int) -> MBarrierUse | None:
    """By `threads` threads of a warp; `value`: of the last operand. None: nothing that counts."""
    suffixes = ins.suffixes
    if ins.opcode == "UBLKCP.S.G":
        return MBarrierUse("copy", address, 0, -16 * (value & 0xFFFF))
    if ins.name == "ARRIVES" and "ARVCNT" in suffixes:
        return MBarrierUse("change", address, threads, 0, late=True)
    if ins.name == "ARRIVES" and "TRANSCNT" in suffixes:
        return MBarrierUse("change", address, 0, -threads, late=True)
    if "EXCH" in suffixes:
        return MBarrierUse("init", address, 2**20 - (value >> 1), 0)
    if "PHASECHK" in suffixes:
        return MBarrierUse("wait", address, value >> 31, 0)
    if "CCTL" in suffixes:
        return None
    if "ARRIVE" in suffixes and "OPTOUT" not in suffixes:
        kind = next((s for s in ("A1T0", "ART0", "A0TR", "A0TX", "A0T1") if s in suffixes), "")
        arrivals, bytes_ = {"": (1, value), "A1T0": (1, 0), "ART0": (value, 0), "A0TR": (0, value),
                            "A0TX": (0, -value), "A0T1": (0, 1)}[kind]  # fmt: skip
        return MBarrierUse("change", address, threads * arrivals, threads * bytes_)
    raise ValueError(f"mbarrier: expected an instruction that is known, got {ins.text!r}")


def uses(
    state: State, ins: Instruction, held: NDArray[np.bool_]
) -> Iterator[tuple[int, MBarrierUse | None]]:
    """Of each warp with threads in `held`: its number, and what the instruction does.

    Raises:
        ValueError: the address or a count is not known, or the instruction is not.
    """
    operand = next(o for o in ins.operands if o.kind == "address")
    if ins.name == "UBLKCP":  # the register after that of the destination
        number = int(operand.text.strip("[]").removeprefix("UR").partition("+")[0])
        addresses = state.get("uniform", number + 1)
    else:
        addresses = state.address(operand, False)
    last = ins.operands[-1]
    values = state.zeros if last.kind == "address" else state.words(last)
    if addresses is None or values is None:
        raise ValueError(f"mbarrier: expected operands that are known, got {ins.text!r}")
    for warp, mine in enumerate(held.reshape(-1, 32)):
        if mine.any():
            at = 32 * warp + int(mine.argmax())
            yield warp, _use(ins, int(addresses[at]), int(values[at]), int(mine.sum()))
