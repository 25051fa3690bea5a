"""Kernels in PTX around wgmma, and how its operands lie in memory and registers.

Layouts are built from what the PTX ISA and CUTLASS (cute/atom/mma_traits_sm90_gmma.hpp) show of
them: matrices of lines, whose pieces of 16 bytes are permuted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_model.ptx.interpreter import Program
from tests.support.ptx_kernels import program

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
# Bytes of a line by the descriptor's swizzle mode.
LINES = {0: 16, 1: 128, 2: 64, 3: 32}


def descriptor(start: int, leading: int, stride: int, swizzle: int, base: int = 0) -> int:
    """Bytes, and the number of the mode."""
    fields = ((start, 0), (leading, 16), (stride, 32))
    bits = sum((value & 0x3FFFF) >> 4 << shift for value, shift in fields)
    return bits | base << 49 | swizzle << 62


@dataclass
class Operand:
    """A matrix [rows of m or n, k] of 16-bit elements in shared memory, from byte `start` on.

    Swizzled lines are full: K-major, k is as long as a line; MN-major, rows are a multiple of it.
    `gap`: bytes between groups of 8 lines, a multiple of a group's own if lines are swizzled.
    """

    matrix: Tensor
    swizzle: int
    k_major: bool
    start: int = 0
    gap: int = 0

    @property
    def strides(self) -> tuple[int, int]:
        """Leading and stride byte offset."""
        rows, depth = self.matrix.shape
        group = 8 * LINES[self.swizzle] + self.gap
        if self.swizzle == 0:  # groups of 8 x 8 elements, those of a row or column are neighbours
            return (group, depth // 8 * group) if self.k_major else (rows // 8 * group, group)
        return (0, group) if self.k_major else (depth // 8 * group, group)

    @property
    def end(self) -> int:
        """The next multiple of 1,024 bytes that is free."""
        rows, depth = self.matrix.shape
        leading, stride = self.strides
        width = LINES[self.swizzle] // 2
        if self.swizzle == 0:
            size = depth // 8 * leading + rows // 8 * stride
        else:
            size = rows // 8 * stride if self.k_major else rows // width * leading
        return -(-(self.start + size) // 1024) * 1024

    def write(self, image: Tensor) -> None:
        """Puts the matrix into the int16 image of shared memory."""
        bits = self.matrix.contiguous().view(torch.int16)
        width = LINES[self.swizzle] // 2  # elements of a line
        leading, stride = (s // 2 for s in self.strides)
        row = torch.arange(bits.shape[0])[:, None]
        k = torch.arange(bits.shape[1])[None, :]
        line, column = (row, k) if self.k_major else (k, row)
        at = self.start // 2 + line % 8 * width + column % 8
        if self.swizzle == 0:
            at = at + k // 8 * leading + row // 8 * stride
        else:
            # A pattern has 8, 4 or 2 rows of 128 bytes.
            pattern = line * width // 64 % (width // 8)
            at = at + (column % width // 8 ^ pattern) * 8
            at = at + line // 8 * stride + column // width * leading
        image[at] = bits

    def descriptor(self, step: int = 0) -> int:
        """Of the 16 columns from 16 * step on."""
        leading, stride = self.strides
        along_k = 2 * (leading if self.swizzle == 0 else 16 if self.k_major else stride)
        base = self.start >> 7 & 7 if self.swizzle else 0
        return descriptor(self.start + along_k * step, leading, stride, self.swizzle, base)


THREAD = torch.arange(128)
WARP, GROUP, MEMBER = THREAD // 32, THREAD % 32 // 4, THREAD % 4


def sum_places(columns: int) -> list[tuple[Tensor, Tensor]]:
    """Row and column of each register of D, for all threads."""
    return [
        (16 * WARP + GROUP + (8 if half else 0), 8 * tile + 2 * MEMBER + odd)
        for tile in range(columns // 8)
        for half in range(2)
        for odd in range(2)
    ]


def input_registers(a: Tensor) -> Tensor:
    """[thread, register] of A [64, 16] in registers."""
    held = []
    for column in (0, 8):
        for row in (0, 8):
            for odd in range(2):
                held.append(a[16 * WARP + GROUP + row, 2 * MEMBER + column + odd])
    return torch.stack(held, 1).contiguous().view(torch.int32)


def fill(bytes_: int, threads: int = 128) -> str:
    """Shared memory from the first parameter."""
    text = """mov.u32 %r0, memory; mad.lo.u32 %r0, %t, 16, %r0;
    mul.wide.u32 %a0, %t, 16; add.u64 %a0, %a0, %p0;
    """
    for at in range(0, bytes_, 16 * threads):
        text += f"""ld.global.v4.u32 {{%r1, %r2, %r3, %r4}}, [%a0+{at}];
        st.shared.v4.u32 [%r0+{at}], {{%r1, %r2, %r3, %r4}};
        """
    return text


FENCE = "fence.proxy.async.shared::cta; "


def sums_of(columns: int, first: int = 0) -> str:
    return "{" + ", ".join(f"%f{first + n}" for n in range(columns // 2)) + "}"


def load_sums(columns: int, pointer: str) -> str:
    text = f"mul.wide.u32 %a1, %t, {2 * columns}; add.u64 %a1, %a1, {pointer};\n"
    return text + "".join(f"ld.global.f32 %f{n}, [%a1+{4 * n}];\n" for n in range(columns // 2))


def store_sums(columns: int, pointer: str, first: int = 0) -> str:
    text = f"mul.wide.u32 %a1, %t, {2 * columns}; add.u64 %a1, %a1, {pointer};\n"
    return text + "".join(
        f"st.global.f32 [%a1+{4 * n}], %f{first + n};\n" for n in range(columns // 2)
    )


def product(
    kind: str,
    columns: int,
    a: str,
    b: int,
    *,
    majors: str,
    first: int = 0,
    adds: bool = True,
    scales: str = "1, 1",
) -> str:
    """One wgmma; `a`: registers in braces, or a 64-bit number; `first`: register of the sums."""
    setup = f"mov.u64 %d1, {b}; "
    if not a.startswith("{"):
        setup += f"mov.u64 %d0, {a}; "
        a = "%d0"
    return f"""{setup} setp.ne.b32 %q9, {int(adds)}, 0;
    wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind}
    {sums_of(columns, first)}, {a}, %d1, %q9, {scales}, {majors};
    """


def kernel(body: str, pointers: int, shared: int, *, sums: int = 128, extra: str = "") -> Program:
    return program(f".reg .f32 %f<{sums}>;\n{body}", pointers, shared=shared, extra=extra)


def gathered(out: Tensor, columns: int) -> Tensor:
    """[64, columns] from what the threads hold."""
    result = torch.empty(64, columns)
    for n, (row, column) in enumerate(sum_places(columns)):
        result[row, column] = out[:, n]
    return result


def scattered(matrix: Tensor) -> Tensor:
    """[thread, register] of D [64, columns]."""
    return torch.stack([matrix[row, column] for row, column in sum_places(matrix.shape[1])], 1)


def image_of(bytes_: int, operands: Sequence[Operand]) -> Tensor:
    image = torch.full((bytes_ // 2,), 0x7FFF, dtype=torch.int16)  # NaN
    for operand in operands:
        operand.write(image)
    return image
