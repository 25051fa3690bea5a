"""The PTX interpreter's wgmma: layouts of operands in shared memory and registers, and values."""

import pytest
import torch

from tests.support.ptx_kernels import POLICIES
from tests.support.seeds import derived
from tests.support.wgmma_kernels import (
    DTYPES,
    FENCE,
    LINES,
    Operand,
    fill,
    gathered,
    image_of,
    input_registers,
    kernel,
    load_sums,
    product,
    scattered,
    store_sums,
)

BEGIN = FENCE + "bar.sync 0; wgmma.fence.sync.aligned;\n"
END = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;\n"
LOAD_A = """mul.wide.u32 %a2, %t, 16; add.u64 %a2, %a2, %p3;
    ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%a2];
"""
IN_REGISTERS = "{%r10, %r11, %r12, %r13}"


def integers(seed: int, *shape: int) -> torch.Tensor:
    """Small enough that sums of products are exact."""
    return torch.randint(
        -8, 9, shape, generator=torch.Generator().manual_seed(derived(seed))
    ).float()


def depth_of(swizzle: int, k_major: bool) -> int:
    return max(16, LINES[swizzle] // 2) if k_major else 32


def operand(matrix: torch.Tensor, swizzle: int, k_major: bool, **places: int) -> Operand:
    """[rows, 16], as the last columns of a longer matrix, with rows up to a whole line."""
    line = LINES[swizzle] // 2
    rows, depth = matrix.shape[0], depth_of(swizzle, k_major)
    padded = rows if k_major or swizzle == 0 else -(-rows // line) * line
    whole = torch.full((padded, depth), float("nan"))
    whole[:, :] = 3
    whole[:rows, depth - 16 :] = matrix
    return Operand(whole.to(matrix.dtype), swizzle, k_major, **places)


def check(
    columns: int,
    kind: str,
    b_mode: tuple,
    a_mode: tuple | None = None,
    *,
    gap: int = 0,
    start: int = 0,
    scales: tuple = (1, 1),
    adds: bool = True,
    policy: int = 0,
) -> None:
    """One wgmma. The modes are those of `operand`; without that of A it is in registers."""
    dtype = DTYPES[kind]
    a, b, c = integers(1, 64, 16), integers(2, columns, 16), integers(3, 64, columns)
    operands = [operand(b.to(dtype), *b_mode, start=start, gap=gap)]
    left, majors = IN_REGISTERS, ""
    if a_mode is not None:
        operands.append(operand(a.to(dtype), *a_mode, start=operands[0].end))
        left, majors = str(last(operands[1])), f"{int(not a_mode[1])}, "
    bytes_ = -(-operands[-1].end // 2048) * 2048
    text = fill(bytes_) + LOAD_A + load_sums(columns, "%p1") + BEGIN
    majors += str(int(not b_mode[1]))
    factors = ", ".join(map(str, scales))
    right = last(operands[0])
    text += product(kind, columns, left, right, adds=adds, scales=factors, majors=majors)
    text += END + store_sums(columns, "%p2")
    out = torch.full((128, columns // 2), float("nan"))
    kernel(text, 4, bytes_).launch(
        "test", image_of(bytes_, operands), scattered(c), out, input_registers(a.to(dtype)),
        block=(128, 1, 1), policy=policy, seed=columns,
    )  # fmt: skip
    want = scales[0] * scales[1] * a @ b.T + (c if adds else 0)
    assert torch.equal(gathered(out, columns), want)


def last(x: Operand) -> int:
    """The descriptor of the last 16 columns."""
    return x.descriptor(x.matrix.shape[1] // 16 - 1)


@pytest.mark.parametrize("b_k_major", [True, False])
@pytest.mark.parametrize("swizzle", [0, 1, 2, 3])
@pytest.mark.parametrize("columns", [8, 64, 96, 256])
def test_b_in_every_layout(columns, swizzle, b_k_major):
    """K-major and MN-major, with all swizzle modes and 16 columns from anywhere in a line."""
    check(columns, "bf16", (swizzle, b_k_major))


@pytest.mark.parametrize("a_k_major", [True, False])
@pytest.mark.parametrize("swizzle", [0, 1, 2, 3])
def test_a_in_every_layout(swizzle, a_k_major):
    for other in (True, False):
        check(32, "f16", (1, other), (swizzle, a_k_major))


@pytest.mark.parametrize("columns", range(8, 257, 8))
def test_every_number_of_columns(columns):
    check(columns, "f16" if columns % 16 else "bf16", (1, columns % 24 != 0))


@pytest.mark.parametrize("k_major", [True, False])
@pytest.mark.parametrize("swizzle", [0, 1, 2, 3])
def test_strides_and_the_place_of_the_pattern(swizzle, k_major):
    """Strides with gaps; and patterns that begin at no multiple of 1,024 bytes."""
    group = 8 * LINES[swizzle]
    check(128, "bf16", (swizzle, k_major), gap=48 if swizzle == 0 else group)
    if swizzle:
        check(64, "bf16", (swizzle, k_major), start=1024 + 384)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("scales", [(1, 1), (-1, 1), (1, -1), (-1, -1)])
def test_scales(policy, adds, scales):
    """Registers of D that nobody has set do not matter where nothing is added to them."""
    check(16, "bf16", (2, True), (1, True), scales=scales, adds=adds, policy=policy)


@pytest.mark.parametrize("kind", DTYPES)
def test_products_of_many_steps(kind):
    """Two chains of wgmma of 4 steps, the second one waited for later; normal values."""
    generator = torch.Generator().manual_seed(derived(5))
    dtype = DTYPES[kind]
    a, b, e = (torch.randn(64, 64, generator=generator).to(dtype) for _ in range(3))
    operands = [Operand(a, 1, True), Operand(b, 1, True, start=8192),
                Operand(e.T.contiguous(), 1, False, start=16384)]  # fmt: skip
    text = fill(24576) + BEGIN
    for first, right, transposed in ((0, operands[1], 0), (32, operands[2], 1)):
        for step in range(4):
            left = str(operands[0].descriptor(step))
            majors = f"0, {transposed}"
            text += product(
                kind, 64, left, right.descriptor(step), first=first, adds=step > 0, majors=majors
            )
        text += "wgmma.commit_group.sync.aligned;\n"
    text += "wgmma.wait_group.sync.aligned 1;\n" + store_sums(64, "%p1")
    text += "wgmma.wait_group.sync.aligned 0;\n" + store_sums(64, "%p2", 32)
    program = kernel(text, 3, 24576)
    image = image_of(24576, operands)
    results = []
    for policy in POLICIES:
        for seed in range(3):
            outs = torch.zeros(128, 32), torch.zeros(128, 32)
            program.launch("test", image, *outs, block=(128, 1, 1), policy=policy, seed=seed)
            results.append(torch.cat(outs))
            for out, want in zip(outs, (a.double() @ b.double().T, a.double() @ e.double()),
                                 strict=True):  # fmt: skip
                assert (gathered(out, 64) - want).abs().max() < 1e-4
    assert all(torch.equal(results[0], other) for other in results)


def test_two_warpgroups_have_their_own_operands():
    """Of 8 warps, with one tile of B for both."""
    a, b = integers(1, 128, 16), integers(2, 64, 64)
    in_b = Operand(b.bfloat16(), 1, True)
    text = fill(8192, 256) + LOAD_A + BEGIN
    text += product("bf16", 64, IN_REGISTERS, in_b.descriptor(), adds=False, majors="0")
    text += END + store_sums(64, "%p2")
    out = torch.zeros(256, 32)
    inputs = torch.cat([input_registers(half.bfloat16()) for half in a.split(64)])
    for policy in POLICIES:
        out.fill_(0)
        kernel(text, 4, 8192).launch(
            "test", image_of(8192, [in_b]), torch.zeros(1), out, inputs, block=(256, 1, 1),
            policy=policy, seed=policy,
        )  # fmt: skip
        got = torch.cat([gathered(half, 64) for half in out.split(128)])
        assert torch.equal(got, a @ b[:, :16].T)
