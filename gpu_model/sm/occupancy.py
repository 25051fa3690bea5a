"""How many blocks of a kernel an SM holds: the rules of CUDA's occupancy calculator."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_model.sm.architectures import PARTITIONS, Architecture


@dataclass(frozen=True)
class Occupancy:
    """Blocks of an SM, and what allows no more: registers, shared memory, warps or blocks."""

    blocks: int
    limit: str


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def occupancy(
    architecture: Architecture, threads: int, registers: int, shared_bytes: int
) -> Occupancy:
    """Blocks that are on an SM at once.

    Args:
        threads: of a block.
        registers: of a thread, as cuobjdump -res-usage says.
        shared_bytes: of a block, static and dynamic.

    Raises:
        ValueError: not one block fits.
    """
    a = architecture
    warps = _up(threads, 32) // 32
    unit = _up(max(registers, 1) * 32, a.register_unit)
    # A warp's registers come from its own partition.
    by_registers = a.registers // PARTITIONS // unit * PARTITIONS // warps
    taken = _up(shared_bytes + a.reserved_shared, a.shared_unit)
    limits = {
        "registers": by_registers,
        "shared memory": a.sm_shared // taken if shared_bytes <= a.block_shared else 0,
        "warps": a.sm_warps // warps,
        "blocks": a.sm_blocks,
    }
    limit = min(limits, key=lambda name: limits[name])
    if limits[limit] == 0:
        raise ValueError(
            f"{limit}: expected a block that fits on an SM of {a.name}, got {threads} threads, "
            f"{registers} registers a thread and {shared_bytes} bytes of shared memory"
        )
    return Occupancy(limits[limit], limit)
