"""What the model takes an SM to be: pipes, how long they are busy with an instruction, latencies.

Frozen: predictions are compared with each other over time, so a constant changes only where a
measurement or a document shows it to be wrong. Sources:

[ptxas] nvcc 13.0's own stall counts: between two independent instructions of a kind in one warp
    (how long the pipe is busy), and from an instruction to the first that needs its result.
[guide] CUDA C++ Programming Guide: throughput of arithmetic instructions, technical
    specifications per compute capability.
[A100], [H100] NVIDIA's white papers on the two architectures; data sheets of A100 SXM4 80 GB and
    H100 SXM5.
[Hopper] Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture via
    Microbenchmarking", 2024, arXiv:2402.13499: mma.sync reaches 62.9 % of an H100's peak; latencies
    of shared memory, L2 and device memory.
[Ampere] Sun et al., "Dissecting Tensor Cores via Microbenchmarks", 2022, arXiv:2206.02874.
    In m64nNk16, 4,096 operations a cycle and SM are reached from N = 64 on, below that A's and B's
    bytes from shared memory take longer than the product.
[fitted] chosen so that the published kernels of docs/development/cuda-model.md come out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gpu_model.sm.sass import Instruction

# Of each partition; `shared` is the SM's one path to shared memory and L1; `none` takes an issue
# slot only.
PIPES = ("tensor", "alu", "fma", "heavy", "xu", "uniform", "shared", "none")
PARTITIONS = 4


class Cost(NamedTuple):
    """`busy`: cycles that the pipe takes nothing else. `latency`: until a result that a barrier
    guards is there; `read`: until the operands are no longer needed. `shared`: cycles of the path
    to shared memory that another pipe's operands take."""

    pipe: str
    busy: float
    latency: float = 0.0
    read: float = 0.0
    shared: float = 0.0


@dataclass(frozen=True)
class Architecture:
    """A GPU; memory in bytes, times in cycles of the SM's clock unless said otherwise."""

    name: str
    capability: int  # major * 10 + minor
    sms: int
    clock: float  # Hz, under load
    dram: float  # bytes a second that kernels reach
    sm_shared: int  # shared memory of an SM
    block_shared: int  # that a block can have
    reserved_shared: int  # that the system takes of each block's
    tensor_busy: float  # m16n8k16 in 16 bits, a partition
    fp32_busy: int
    # The same for both.
    shared_latency: float = 29.0  # [Hopper], [Ampere]
    global_latency: float = 400.0  # of loads, between those of L2 and of DRAM [Hopper]
    copy_latency: float = 900.0  # of asynchronous copies, until a wait for them ends [fitted]
    registers: int = 65536
    register_unit: int = 256  # a warp's registers are a multiple of this
    shared_unit: int = 128
    sm_warps: int = 64
    sm_blocks: int = 32
    barrier_latency: float = 20.0
    queue: float = 12.0  # cycles of work that may wait before the path to shared memory
    launch_latency: float = 800.0  # from a block's end to the next one's first instruction [fitted]
    kernel_seconds: float = 4e-6  # from one kernel's end to the next one's start [fitted]
    fork_seconds: float = 1e-6  # more for launches on several streams
    # Cycles that wgmma takes for a column of its [64, n] sums, 32 bytes deep; 0: there is none.
    wgmma_column: float = 0.0
    # From a product's end until a wait for it ends: as for mma.sync.
    wgmma_latency: float = 33.0


# [guide], [A100] for sizes; tensor_busy: 1,024 multiply-adds a cycle and SM. dram: 72 % of 2,039
# GB/s, as fitted for the H100. No published kernel has been compared with these.
A100 = Architecture("A100", 80, 108, 1.41e9, 1.47e12, 167936, 166912, 1024, 8.0, 2)
# [guide], [H100] for sizes; tensor_busy: 4 / 0.629 [Hopper]. dram: 72 % of 3,352 GB/s [fitted].
# wgmma_column: 64 x 16 multiply-adds, of which an SM does 2,048 a cycle [H100], [Hopper].
H100 = Architecture(
    *("H100", 90, 132, 1.755e9, 2.4e12, 233472, 232448, 1024, 6.36, 1), wgmma_column=0.5
)
ARCHITECTURES = {a.name: a for a in (A100, H100)}

_ALU_TEXT = """
    LOP3 LOP32I IADD3 IADD VIADD SEL FSEL FMNMX FMNMX3 IMNMX VIMNMX VIMNMX3 VIADDMNMX ISETP FSETP
    PLOP3 LEA SHF PRMT F2FP IABS MOV MOV32I P2R R2P CS2R FSET SGXT BMSK I2FP HMNMX2 HSET2 HSETP2"""
_NOTHING_TEXT = """
    BRA JMP BSSY BSYNC BREAK BMOV EXIT NOP WARPSYNC BAR DEPBAR LDGDEPBAR CALL RET LEPC MEMBAR
    ERRBAR CCTL CCTLL YIELD ENDCOLLECTIVE NANOSLEEP BPT FENCE ELECT VOTE KILL PREEXIT ACQBULK
    WARPGROUP USETMAXREG"""
_XU_TEXT = "MUFU F2I I2F F2F FRND FLO POPC BREV FCHK"
_UNIFORM_TEXT = """
    UMOV UIADD3 UIMAD ULEA ULOP3 USHF UISETP USEL UPLOP3 UPRMT UFLO UPOPC UBREV UBMSK USGXT UIMNMX
    ULDC UP2UR UR2UP UIABS VOTEU"""
_ALU, _NOTHING, _XU, _UNIFORM = (
    frozenset(text.split()) for text in (_ALU_TEXT, _NOTHING_TEXT, _XU_TEXT, _UNIFORM_TEXT)
)


def _memory_bytes(instruction: Instruction) -> int:
    suffixes = instruction.suffixes
    return 16 if "128" in suffixes else 8 if "64" in suffixes else 4


def cost(architecture: Architecture, instruction: Instruction, wavefronts: int = 0) -> Cost:
    """What an instruction costs.

    Args:
        wavefronts: accesses to shared memory that its addresses need; 0: as many as its size does.

    Raises:
        ValueError: an instruction that is not listed here.
    """
    name, a = instruction.name, architecture
    if name == "HMMA":
        busy = a.tensor_busy if "16816" in instruction.suffixes else a.tensor_busy / 2
        return Cost("tensor", busy, 33.0)
    if name == "HGMMA" and a.wgmma_column:
        # Of a warpgroup each warp does its own 16 rows, and reads a quarter of what all need.
        columns = 2 * instruction.result_width
        rows = columns if instruction.operands[1].kind == "register" else 64 + columns
        busy, shared = columns * a.wgmma_column, rows * 32 / 128 / PARTITIONS
        return Cost("tensor", busy, a.wgmma_latency, shared=shared)
    if name in ("FFMA", "FMUL", "FADD", "FFMA32I", "FMUL32I"):
        return Cost("fma" if a.fp32_busy == 1 else "heavy", a.fp32_busy)
    if name in ("HFMA2", "HMUL2", "HADD2"):
        slow = a.capability == 80 and "BF16" in instruction.opcode  # [guide]
        return Cost("fma", 2 if slow else 1)
    if name == "IMAD":
        return Cost("heavy", 4 if instruction.suffixes & {"WIDE", "HI"} else 2)  # [ptxas]
    if name in _ALU:
        return Cost("alu", 2)  # [ptxas]; 64 results a cycle and SM [guide]
    if name in _XU:
        return Cost("xu", 8, 18.0, 8.0)  # [ptxas]; 16 results a cycle and SM [guide]
    if name == "LDSM":
        # One matrix of 8 rows of 16 bytes takes all banks once.
        return Cost("shared", wavefronts or instruction.result_width, a.shared_latency, 8.0)
    if name in ("LDS", "STS", "LDL", "STL", "STSM", "ATOMS"):
        busy = wavefronts or _memory_bytes(instruction) // 4
        return Cost("shared", busy, a.shared_latency, 8.0)
    if name in ("LDG", "LD", "LDGSTS", "ATOMG", "STG", "ST"):
        # 128 bytes a cycle and SM between registers, L1 and shared memory.
        busy = max(wavefronts if name == "LDGSTS" else 0, _memory_bytes(instruction) // 4)
        latency = a.copy_latency if name == "LDGSTS" else a.global_latency
        return Cost("shared", busy, latency, 12.0)
    if name in ("SYNCS", "ARRIVES"):
        return Cost("shared", 1, a.shared_latency, 8.0)
    if name == "UBLKCP":
        return Cost("none", 1, a.copy_latency, 12.0)
    if name in ("RED", "REDG"):
        return Cost("shared", 2, 0.0, 12.0)
    if name in ("SHFL", "LDC", "REDUX", "MATCH"):
        return Cost("shared", 1, 24.0 if name == "SHFL" else 30.0, 8.0)
    if name in ("S2R", "S2UR", "R2UR"):
        return Cost("none", 1, 20.0, 8.0)
    if name in _NOTHING:
        return Cost("none", 1, 20.0)
    if name in _UNIFORM:
        return Cost("uniform", 1, 12.0)
    raise ValueError(f"opcode: expected one that architectures.py lists, got {instruction.opcode}")
