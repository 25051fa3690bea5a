"""The interpreter's late copies and products: nothing is there before the wait for it.

With `timing="unchecked"` no check of order reports a missing wait. Only the values do, so these
tests and the checks hold each other up.
"""

import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from gpu_model.block_model import compiled_for
from gpu_model.ptx import compiler
from gpu_model.ptx.interpreter import Program
from tests.support.attention_cases import FUSED, MMA, SPLIT, WGMMA, Case, with_gradients
from tests.support.backends import OnTheModel
from tests.support.model_attention import model, ptx_of
from tests.support.ptx_kernels import ADDRESSES, POLICIES, program
from tests.support.seeds import derived
from tests.support.wgmma_kernels import (
    FENCE,
    Operand,
    fill,
    gathered,
    image_of,
    kernel,
    load_sums,
    product,
    scattered,
    store_sums,
)

COPY = "cp.async.ca.shared.global [%r0+{0}], [%a0+{0}], 4; cp.async.commit_group;\n"
COMMIT = "wgmma.commit_group.sync.aligned;\n"


def test_copies_land_at_their_wait():
    """Two groups: after the first wait the second one is still on its way."""
    body = ADDRESSES + COPY.format(0) + COPY.format(256)
    for turn, waits in enumerate(("", "cp.async.wait_group 1;\n", "cp.async.wait_group 0;\n")):
        body += waits
        for half in (0, 256):
            at = 512 * turn + half
            body += f"ld.shared.u32 %r2, [%r0+{half}]; st.global.u32 [%a1+{at}], %r2;\n"
    x = torch.arange(128).int()
    for policy in POLICIES:
        out = torch.zeros(3, 2, 64).int()
        program(body, 2, shared=512).launch(
            "test", x, out, block=(64, 1, 1), policy=policy, timing="unchecked"
        )
        landed = [(1, 0), (2, 0), (2, 1)]
        for turn in range(3):
            for half, part in enumerate(x.view(2, 64)):
                want = part if (turn, half) in landed else torch.full_like(part, -1)
                assert torch.equal(out[turn, half], want)


def test_late_copies_read_their_source_late():
    """What is written over it before the wait is copied."""
    body = ADDRESSES + COPY.format(0) + "st.global.u32 [%a0], 777; cp.async.wait_group 0;\n"
    body += "ld.shared.u32 %r2, [%r0]; st.global.u32 [%a1], %r2;\n"
    for timing, late in (("late", {64}), ("seeded", set(range(1, 64)))):
        x, out = torch.arange(64).int(), torch.zeros(64).int()
        program(body, 2, shared=256).launch("test", x, out, block=(64, 1, 1), timing=timing)
        assert int((out == 777).sum()) in late


def test_sums_are_nan_until_their_wait():
    """Two groups, of which the second one adds two products to what its registers hold."""
    generator = torch.Generator().manual_seed(derived(1))
    a, b, c = (
        torch.randint(-8, 9, (64, columns), generator=generator).float() for columns in (16, 16, 64)
    )
    first = Operand(a.repeat(1, 4).bfloat16(), 1, True)
    second = Operand(b.repeat(1, 4).bfloat16(), 1, True, start=first.end)
    operands = str(first.descriptor()), second.descriptor()
    body = fill(second.end) + load_sums(64, "%p1")
    body += "".join(f"mov.f32 %f{32 + n}, %f{n};\n" for n in range(32))
    body += FENCE + "bar.sync 0; wgmma.fence.sync.aligned;\n"
    body += product("bf16", 64, *operands, majors="0, 0", adds=False) + COMMIT
    body += 2 * product("bf16", 64, *operands, majors="0, 0", first=32) + COMMIT
    for turn in range(3):
        body += f"wgmma.wait_group.sync.aligned {2 - turn};\n" if turn > 0 else ""
        for half in range(2):
            body += store_sums(64, f"%p{2 + 2 * turn + half}", 32 * half)
    for policy in POLICIES:
        outs = [torch.zeros(128, 32) for _ in range(6)]
        kernel(body, 8, second.end).launch(
            "test", image_of(second.end, [first, second]), scattered(c), *outs, block=(128, 1, 1),
            policy=policy, timing="unchecked",
        )  # fmt: skip
        values = [gathered(out, 64) for out in outs]
        for number, want in ((2, a @ b.T), (4, a @ b.T), (5, c + 2 * a @ b.T)):
            assert torch.equal(values[number], want)
        assert all(values[number].isnan().all() for number in (0, 1, 3))


# Compiled kernels

WAITS = ("copy_async_wait", "wgmma_wait")


@pytest.fixture(params=[MMA, WGMMA], ids=["mma", "wgmma"])
def on_model(request: pytest.FixtureRequest) -> Iterator[OnTheModel]:
    """What nvcc makes of attention runs there, by one of its two sets of kernels."""
    if compiler.nvcc() is None:
        pytest.skip("needs nvcc")
    with compiled_for("80"), OnTheModel() as mode:
        mode.policy, mode.timing, mode.capability = "in_order", "unchecked", request.param
        yield mode


def passes(case: Case) -> list[Tensor]:
    """Of a forward and a backward pass on equal inputs."""
    torch.manual_seed(derived(2))
    inputs, dout = case.inputs(torch.bfloat16), case.dout(torch.bfloat16)
    return with_gradients(case.ours, inputs, dout)


def differ(some: list[Tensor], others: list[Tensor]) -> bool:
    return not all(map(torch.equal, some, others))


@pytest.mark.parametrize("sms", [FUSED, SPLIT], ids=["fused", "split"])
def test_values_show_every_missing_wait(on_model: OnTheModel, sms: int) -> None:
    on_model.multiprocessors = sms
    case = Case([140], heads=1, p=0.1)
    model().forget_sites()
    right = passes(case)
    sites = [site for site in model().sites() if site.kind in WAITS]
    assert {site.kind for site in sites} == set(WAITS[: 1 + (on_model.capability == WGMMA)])
    for site in sites:
        with model().without(site):
            assert differ(passes(case), right), site
    on_model.timing = "seeded"
    assert not differ(passes(case), right)


@pytest.mark.parametrize("timing", ["unchecked", "seeded"])
def test_a_wait_that_comes_too_late(on_model: OnTheModel, timing: str) -> None:
    """Each wait for products, or else for copies, behind the next lines of the text."""
    wgmma = on_model.capability == WGMMA
    name = "attention/attention_d64" + ("_sm90a" if wgmma else "")
    wait = r"wgmma\.wait_group\.sync\.aligned \d+" if wgmma else r"cp\.async\.wait_group \d+"
    texts = ptx_of("80", name)
    for file, text in texts.items():
        texts[file], count = re.subn(rf"({wait};[^\n]*\n)((?:[^\n]*\n){{120}})", r"\2\1", text)
        assert count > 0
    on_model.multiprocessors, case = SPLIT, Case([70], heads=1)
    right = passes(case)
    on_model.timing = timing
    with model().running(Program(texts)):
        if timing == "unchecked":
            assert differ(passes(case), right)
        else:
            with pytest.raises(RuntimeError, match=r"not waited for|no wgmma\.wait_group"):
                passes(case)
