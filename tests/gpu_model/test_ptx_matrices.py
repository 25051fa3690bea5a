"""The PTX interpreter's tensor-core instructions, with the layouts as the PTX ISA gives them for
each element, and the primitives of csrc/cuda as nvcc compiles them."""

import pytest
import torch
from torch import Tensor

from gpu_model import build, conformance
from gpu_model.block_model import POLICIES, Model, compiled_for
from gpu_model.ptx.compiler import nvcc
from tests.support.ptx_kernels import evaluate, program
from tests.support.seeds import derived

LANE = torch.arange(32)
GROUP, MEMBER = LANE // 4, LANE % 4
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# Type of the operands, depth, type of the sums.
SHAPES = [("f16", 16, F32), ("f16", 8, F32), ("bf16", 16, F32), ("bf16", 8, F32), ("tf32", 8, F32),
          ("tf32", 4, F32), ("f16", 16, F16), ("f16", 8, F16)]  # fmt: skip
DTYPES = {"f16": F16, "bf16": BF16, "tf32": F32}


def places(kind: str, depth: int) -> tuple[list, list, list]:
    """Of each element of A, B and C that a lane holds: row and column."""
    if kind == "tf32":
        a = [(GROUP + 8 * (i % 2), MEMBER + 4 * (i // 2)) for i in range(depth // 2)]
        b = [(MEMBER + 4 * i, GROUP) for i in range(depth // 4)]
    else:
        a = [(GROUP + (8 if i // 2 % 2 else 0), 2 * MEMBER + i % 2 + (8 if i >= 4 else 0))
             for i in range(depth // 2)]  # fmt: skip
        b = [(2 * MEMBER + i % 2 + (8 if i >= 2 else 0), GROUP) for i in range(depth // 4)]
    c = [(GROUP + (8 if i >= 2 else 0), 2 * MEMBER + i % 2) for i in range(4)]
    return a, b, c


def registers(x: Tensor, elements: list) -> list[Tensor]:
    """The 32-bit registers that hold a matrix."""
    held = torch.stack([x[row, column] for row, column in elements], 1).contiguous()
    return list(held.view(torch.int32).T.contiguous())


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("kind", "depth", "sums"), SHAPES)
def test_mma(kind, depth, sums, exact):
    generator = torch.Generator().manual_seed(derived(depth))
    dtype = DTYPES[kind]
    shapes = ((16, depth), (depth, 8), (16, 8))
    if exact:
        a, b, c = (torch.randint(-8, 9, s, generator=generator).float() for s in shapes)
    else:
        a, b, c = (torch.randn(s, generator=generator) for s in shapes)
    a, b, c = a.to(dtype), b.to(dtype), c.to(sums)
    if kind == "tf32":  # of which the last 13 bits do not count
        a, b = ((t.view(torch.int32) | 0x1FFF).view(F32) for t in (a, b))
    inputs = [
        r for x, p in zip((a, b, c), places(kind, depth), strict=True) for r in registers(x, p)
    ]
    name = {F32: "f32", F16: "f16"}[sums]
    count = 4 if sums == F32 else 2
    sizes = [len(inputs) - count - depth // (4 if kind == "tf32" else 8), 0, count]
    sizes[1] = len(inputs) - sizes[0] - count
    first, groups = 0, []
    for size in sizes:
        groups.append("{" + ", ".join(f"x{first + k}" for k in range(size)) + "}")
        first += size
    out = "{" + ", ".join(f"y{k}" for k in range(count)) + "}"
    text = (
        f"mma.sync.aligned.m16n8k{depth}.row.col.{name}.{kind}.{kind}.{name} "
        f"{out}, {', '.join(groups)};"
    )
    got = evaluate(text, inputs, *[torch.int32] * count)
    held = torch.stack(got, 1).contiguous().view(sums)
    result = torch.empty(16, 8, dtype=sums)
    for i, (row, column) in enumerate(places(kind, depth)[2]):
        result[row, column] = held[:, i]
    if kind == "tf32":
        a, b = ((t.view(torch.int32) & ~0x1FFF).view(F32) for t in (a, b))
    want = a.double() @ b.double() + c.double()
    scale = a.double().abs() @ b.double().abs() + c.double().abs()
    error = ((result.double() - want).abs() / scale.clamp_min(1)).max()
    assert error <= (0 if exact and sums == F32 else 1e-3 if sums == F16 else 2e-6)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices_to_and_from_shared_memory(count, transposed):
    """Rows anywhere; those of several matrices may be the same."""
    rows = torch.randint(-(2**15), 2**15, (32, 8)).to(torch.int16)
    address = torch.randperm(32).int()
    address[3] = address[4]
    trans = ".trans" if transposed else ""
    names = ", ".join(f"%r{10 + m}" for m in range(count))
    stores = "".join(f"st.global.u32 [%a0+{4 * m}], %r{10 + m};" for m in range(count))
    body = f"""
    mul.wide.u32 %a1, %t, 16; add.u64 %a1, %a1, %p0; ld.global.v4.u32 {{%r1, %r2, %r3, %r4}}, [%a1];
    mov.u32 %r0, memory; mad.lo.u32 %r5, %t, 16, %r0;
    st.shared.v4.u32 [%r5], {{%r1, %r2, %r3, %r4}};
    bar.warp.sync -1;
    mul.wide.u32 %a1, %t, 4; add.u64 %a1, %a1, %p1; ld.global.u32 %r6, [%a1];
    mad.lo.u32 %r6, %r6, 16, %r0;
    ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{names}}}, [%r6];
    mul.wide.u32 %a0, %t, 16; add.u64 %a0, %a0, %p2; {stores}
    bar.warp.sync -1;
    stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r5], {{{names}}};
    bar.warp.sync -1; ld.shared.v4.u32 {{%r1, %r2, %r3, %r4}}, [%r5];
    mul.wide.u32 %a1, %t, 16; add.u64 %a1, %a1, %p3; st.global.v4.u32 [%a1], {{%r1, %r2, %r3, %r4}};
    """
    out, back = torch.zeros(32, 4, dtype=torch.int32), torch.zeros(32, 8, dtype=torch.int16)
    program(body, 4, shared=512).launch("test", rows, address, out, back)
    matrices = rows[address.long()].view(4, 8, 8)[:count]
    seen = matrices.transpose(1, 2) if transposed else matrices
    pairs = seen.reshape(count, 32, 2).transpose(0, 1).contiguous().view(torch.int32)
    assert torch.equal(out[:, :count], pairs.view(32, count))
    # Stored again they are what was loaded.
    assert torch.equal(back[: 8 * count].view(count, 8, 8), matrices)


@pytest.fixture(params=["75", "80", "90a"])
def primitives(request):
    if nvcc() is None:
        pytest.skip("needs nvcc")
    model = Model(build.load(build.KERNELS / "conformance.cpp"))

    def call(name, *arguments):
        model.clear()
        for tensor in arguments:
            if isinstance(tensor, Tensor):
                model.register(tensor)
        model.call(name, *arguments)

    call.model = model
    # sm_75 multiplies no bf16, and fp16 in two halves.
    call.products, call.depths = ((F16,), 2) if request.param == "75" else ((BF16, F16), 1)
    with compiled_for(request.param):
        yield call


@pytest.mark.parametrize("policy", POLICIES)
def test_compiled_primitives_do_what_they_say(primitives, policy):
    primitives.model.configure(policy, seed=1)
    conformance.check_matrices(primitives, "cpu")
    conformance.check_shuffle(primitives, "cpu")
    conformance.check_ballot(primitives, "cpu")
    conformance.check_copy(primitives, "cpu")
    for threshold in conformance.THRESHOLDS:
        conformance.check_decisions(primitives, "cpu", threshold)
    for dtype in (BF16, F16):
        conformance.check_wgmma(primitives, "cpu", dtype)
        conformance.check_pack(primitives, "cpu", dtype)
    for dtype in primitives.products:
        conformance.check_mma(primitives, "cpu", dtype)
        primitives.model.statistics(reset=True)
        conformance.check_tile(primitives, "cpu", dtype)
        counts = primitives.model.statistics()
        products = primitives.depths * 16
        assert (counts.mma, counts.load_matrices, counts.bank_conflict_cycles) == (products, 12, 0)
